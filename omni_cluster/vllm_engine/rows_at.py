"""Which positions of a request have rows that go out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from omni_cluster.models.stage_spec import RowsAt

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def prompt_mask(rows_at: RowsAt, length: int, media: Sequence[MultiModalFeatureSpec]) -> np.ndarray | None:
    """Which of a prompt's positions have rows, bool `[length]`, and none behind them; None: all positions have."""
    if rows_at == "all":
        return None
    mask = np.full(length, rows_at == "prompt")
    for each in media if rows_at == "media" else ():
        place = each.mm_position
        embedded = True if place.is_embed is None else place.is_embed.numpy()
        mask[place.offset : place.offset + place.length] |= embedded
    return mask


def unless_all(mask: np.ndarray | None) -> np.ndarray | None:
    """As `Rows` have it."""
    return None if mask is None or mask.all() else mask
