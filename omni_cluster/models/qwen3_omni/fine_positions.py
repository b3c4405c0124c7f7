"""Positions between whole ones: transformers gives frames of a video the positions of their times, as floats.

vLLM keeps whole positions, `[3, n]` of int64, and adds one for each token behind a prompt. Here a position is packed
into such a number, its whole part below and its fraction above, so that one more is the next position still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

WHOLE_BITS, FRACTION_BITS = 32, 30


def packed(positions: Any) -> Any:
    """Of float32 positions, none below zero: int64 of the same shape. Those from 1/128 on are exact."""
    below = np.floor(positions)
    fraction = np.round((positions - below).astype(np.float64) * (1 << FRACTION_BITS)).astype(np.int64)
    return (fraction << WHOLE_BITS) + below.astype(np.int64)


def unpacked(positions: torch.Tensor) -> torch.Tensor:
    """float32 of what `packed` made, on any device."""
    return whole(positions).float() + (positions >> WHOLE_BITS).float() * 2.0**-FRACTION_BITS


def as_floats(positions: np.ndarray) -> np.ndarray:
    """`unpacked` of an array, without torch."""
    fractions = (positions >> WHOLE_BITS) * 2.0**-FRACTION_BITS
    made: np.ndarray = (whole(positions) + fractions).astype(np.float32)
    return made


def packed_delta(positions: np.ndarray) -> np.int64:
    """Of a prompt's float32 positions `[3, n]`, how far what follows is from its number: added to that it is packed.

    `generate` of transformers counts on from the last position, behind which a video of little sound may reach. Of
    int64, because vLLM adds a number of int32.
    """
    return np.int64(packed(positions[:, -1].max() + np.float32(1)) - positions.shape[1])


def whole(positions: Any) -> Any:
    """int64 without the fractions, a tensor or an array."""
    return positions & ((1 << WHOLE_BITS) - 1)
