"""Which frames of a video are taken, and how a decoded one becomes as large as it is kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_cluster.openai_api.memory_bound import not_counted


def spread_indices(total: int, count: int) -> list[int]:
    """`torch.linspace(0, total - 1, count).round()`, in its own order of steps of float32."""
    step = np.float32(total - 1) / np.float32(count - 1)
    places = np.arange(count, dtype=np.float32)
    from_end = np.float32(total - 1) - step * np.float32(count - 1 - places)
    spread = np.where(places < count // 2, step * places, from_end)
    chosen: list[int] = np.rint(spread).astype(int).tolist()
    return chosen


def scaled(picture: npt.NDArray[np.uint8], size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """As transformers' video processors scale: bicubic on bytes, with antialiasing."""
    if picture.shape[:2] == size:
        return picture
    with not_counted():
        import torch
    planes = torch.from_numpy(picture).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(planes, size=size, mode="bicubic", antialias=True)
    return np.asarray(made[0].permute(1, 2, 0).numpy(), np.uint8)
