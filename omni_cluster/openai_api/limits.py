"""What one request of the API may ask for, and what one that says nothing gets, as the configuration has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from omni_cluster.openai_api.bodies import MAX_MARKS
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
    max_prompt_tokens: int
    max_choices: int = 1

    @property
    def max_text_chars(self) -> int:
        """More than any prompt has: 5 characters a token are usual."""
        return max(1 << 20, 64 * self.max_prompt_tokens)

    @property
    def max_marks(self) -> int:
        """Of a body's JSON, see `bodies`: each is a token at least where it is text."""
        return max(MAX_MARKS, 4 * self.max_prompt_tokens)


@dataclass(frozen=True)
class ApiDefaults:
    """`voice_aliases`: voices of the model by the names that other services' clients send.

    `modalities`: of a chat that names none, and no voice. `sample_rate_hz`: of the model's sound. `speaking`: fields
    that say how to speak, as far as the model heeds them.
    """

    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    modalities: tuple[str, ...] = ("text",)
    sample_rate_hz: int = 0
    speaking: Collection[str] = ()


NO_DEFAULTS = ApiDefaults()
