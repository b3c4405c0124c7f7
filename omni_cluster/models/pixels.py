"""Pixels of images and frames as transformers' processors scale and normalise them, to the bit, in less time.

The processors make float32 of whole images and then reorder it into patches, 4 bytes a value in strides. Here they
reorder the bytes, and the same operations follow on the patches, some at a time, which the CPU's caches hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

OPTIONS: Final = ("images_kwargs", "videos_kwargs")
"""The arguments that tell a processor to leave values as bytes."""
FIELDS: Final = {"pixel_values": "image_processor", "pixel_values_videos": "video_processor"}
"""What a processor of transformers makes of images and videos, and the part that makes it."""
_SIZES: Final = {"max_pixels", "min_pixels", "size"}
_PART_VALUES: Final = 1 << 20
"""Normalised at once: 4 MiB of float32."""


def options_of(processor: Any, media: Iterable[Any], given: Mapping[str, object]) -> Mapping[str, object]:
    """`OPTIONS`; none if `media` are not all bytes, or if `given` or the processor's own configuration is unusual.

    `media`: images and the frames of videos. `given`: options by their names.
    """
    are_usual = all(_is_usual(getattr(processor, part)) for part in FIELDS.values())
    if not are_usual or not given.keys() <= _SIZES or not all(map(_is_of_bytes, media)):
        return {}
    # New ones each time: transformers removes entries from the dictionaries that it is given.
    return {option: {"do_rescale": False, "do_normalize": False} for option in OPTIONS}


def _is_usual(part: Any) -> bool:
    """Whether it rescales and normalises each channel by values of its own."""
    of_channels = isinstance(part.image_mean, list | tuple) and isinstance(part.image_std, list | tuple)
    return of_channels and bool(part.do_rescale and part.do_normalize)


def _is_of_bytes(medium: Any) -> bool:
    return isinstance(medium, Image.Image) or getattr(medium, "dtype", None) in (np.uint8, torch.uint8)


def normalize(fields: dict[str, Any], processor: Any, dtype: torch.dtype) -> None:
    """Replaces the bytes `[patches, values]` that `OPTIONS` left in `fields` by what the vision tower takes."""
    for field, part in FIELDS.items():
        if field in fields:
            fields[field] = _normalized(fields[field], getattr(processor, part), dtype)


def _normalized(patches: torch.Tensor, part: Any, dtype: torch.dtype) -> torch.Tensor:
    """A row is `[channels, frames of a step, height, width]` of a patch, as the processor's `patchify` has it."""
    made = torch.empty(patches.shape, dtype=dtype)
    patch = len(part.image_mean), part.temporal_patch_size * part.patch_size, part.patch_size
    rows = max(1, _PART_VALUES // patches.shape[1])
    how = part.do_rescale, part.rescale_factor, part.do_normalize, tuple(part.image_mean), tuple(part.image_std)
    for some, out in zip(patches.split(rows), made.split(rows), strict=True):
        out.copy_(part.rescale_and_normalize(some.view(-1, *patch), *how).view(out.shape))
    return made
