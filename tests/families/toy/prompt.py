"""What the toy makes of a prompt: rows for the next stage, and the sizes of the pictures that come with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL.Image import Image

from omni_cluster.types.media import Media
from omni_cluster.types.rows import Rows

KIND = "prompt"
WIDTH = 16
"""Bytes of a row: those of some thousand tokens are more than Ray gives away without its store."""


def rows_of(token_ids: Sequence[int]) -> Rows:
    """A row for each token of the prompt."""
    bytes_of_tokens = np.array(token_ids, np.uint8)
    return Rows(KIND, "uint8", 0, np.repeat(bytes_of_tokens[:, None], WIDTH, axis=1))


def sum_of(rows: Rows) -> int:
    """Another one wherever a row is missing or not the request's."""
    return int(rows.raw.sum(dtype=np.int64)) // WIDTH


def seen(media: Media) -> str:
    """Width and height of each picture, in words."""
    return "".join(f"[{width}x{height}] " for height, width in map(_shape, media.images))


def _shape(picture: Image | np.ndarray) -> tuple[int, int]:
    return picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)
