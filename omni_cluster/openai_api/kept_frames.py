"""Which frames of a video the model is shown, how large they are kept, and how a decoded one becomes that large."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from omni_cluster.openai_api.memory_bound import not_counted

FRAME_FACTOR: Final = 2
"""Frames that the model takes together."""
MIN_FRAMES: Final = 4
MAX_KEPT_PIXELS: Final = 64 * 768 * 28 * 28
"""Pixels of all frames of a video up to which they are kept as decoded: 38.5 million, 116 MB."""

_PATCH: Final = 28
_MIN_PIXELS: Final = 128 * _PATCH * _PATCH
_MAX_PIXELS: Final = 768 * _PATCH * _PATCH
_TOTAL_PIXELS: Final = int(128_000 * _PATCH * _PATCH * 0.9)


def floor_even(number: float) -> int:
    """The largest multiple of `FRAME_FACTOR` that is not above `number`."""
    return math.floor(number / FRAME_FACTOR) * FRAME_FACTOR


def frame_count(total: int, file_fps: float, fps: float, max_frames: int) -> int:
    """`smart_nframes`, in its own order of floating-point steps; 2 for a file of one frame."""
    most = floor_even(min(max_frames, total))
    wanted = min(max(total / file_fps * fps, MIN_FRAMES), most, total)
    return max(floor_even(wanted), FRAME_FACTOR)


def spread_indices(total: int, count: int) -> list[int]:
    """`torch.linspace(0, total - 1, count).round()`, in its own order of steps of float32."""
    step = np.float32(total - 1) / np.float32(count - 1)
    places = np.arange(count, dtype=np.float32)
    from_end = np.float32(total - 1) - step * np.float32(count - 1 - places)
    spread = np.where(places < count // 2, step * places, from_end)
    chosen: list[int] = np.rint(spread).astype(int).tolist()
    return chosen


def kept_size(count: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of the frames that are kept: as decoded, or `smart_resize` of Qwen's package."""
    share = _TOTAL_PIXELS * FRAME_FACTOR // count
    max_pixels = max(min(_MAX_PIXELS, share), int(_MIN_PIXELS * 1.05))
    if count * height * width <= MAX_KEPT_PIXELS or height * width <= max_pixels:
        return height, width
    rounded = round(height / _PATCH) * _PATCH, round(width / _PATCH) * _PATCH
    if rounded[0] * rounded[1] <= max_pixels:
        return max(_PATCH, rounded[0]), max(_PATCH, rounded[1])
    shrink = math.sqrt(height * width / max_pixels)
    return _floor_patch(height / shrink), _floor_patch(width / shrink)


def _floor_patch(length: float) -> int:
    return max(_PATCH, math.floor(length / _PATCH) * _PATCH)


def scaled(picture: npt.NDArray[np.uint8], size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """As transformers' video processor scales: bicubic on bytes, with antialiasing."""
    if picture.shape[:2] == size:
        return picture
    with not_counted():
        import torch
    planes = torch.from_numpy(picture).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(planes, size=size, mode="bicubic", antialias=True)
    return np.asarray(made[0].permute(1, 2, 0).numpy(), np.uint8)
