"""Which frames of a video Qwen2.5-Omni is shown.

The numbers of Qwen's own package, `smart_nframes` and `smart_resize` of
qwen-omni-utils/src/qwen_omni_utils/v2_5/vision_process.py (github.com/QwenLM/Qwen2.5-Omni, commit 3e266b0), which
refuses a file of one frame.
"""

from __future__ import annotations

from omni_cluster.types.media import FramePolicy

_PATCH = 28

FRAMES = FramePolicy(
    together=2,
    least=4,
    kept_pixels=64 * 768 * _PATCH * _PATCH,  # 38.5 million, 116 MB
    patch=_PATCH,
    min_pixels=int(128 * _PATCH * _PATCH * 1.05),
    max_pixels=768 * _PATCH * _PATCH,
    total_pixels=int(128_000 * _PATCH * _PATCH * 0.9),
)
