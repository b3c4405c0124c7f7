"""Which frames of a video Qwen3-Omni is shown.

The numbers of Qwen's own package, as `qwen2_5_omni/video_frames.py` has them, for patches of this family's size.
"""

from __future__ import annotations

from omni_cluster.types.media import FramePolicy

_PATCH = 32

FRAMES = FramePolicy(
    together=2,
    least=4,
    kept_pixels=64 * 768 * _PATCH * _PATCH,  # 50.3 million, 151 MB
    patch=_PATCH,
    min_pixels=int(128 * _PATCH * _PATCH * 1.05),
    max_pixels=768 * _PATCH * _PATCH,
    total_pixels=int(128_000 * _PATCH * _PATCH * 0.9),
)
