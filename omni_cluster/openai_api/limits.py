"""What one request of the API may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from omni_cluster.openai_api.video import VideoLimits


@dataclass(frozen=True)
class ApiLimits:
    """Bytes, seconds, pixels and `video` are of one media part; parts, fetched and decoded bytes of a request."""

    max_body_bytes: int
    max_audio_parts: int
    max_image_parts: int
    max_video_parts: int
    max_media_bytes: int
    max_audio_s: float
    max_image_pixels: int
    max_decoded_bytes: int
    max_output_tokens: int
    video: VideoLimits
