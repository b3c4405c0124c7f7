"""Positions between whole ones: transformers gives frames of a video the positions of their times, as floats.

vLLM keeps whole positions, `[3, n]` of int64, and adds one for each token behind a prompt. Here a position is packed
into such a number, its whole part below and its fraction above, so that one more is the next position still.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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


def whole(positions: torch.Tensor) -> torch.Tensor:
    """int64 without the fractions."""
    return positions & ((1 << WHOLE_BITS) - 1)
