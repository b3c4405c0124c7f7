"""Rows that tests give to stages, of a kind that no family has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from omni_cluster.types.rows import Earlier, PrefixHashes, Rows

KIND = "of tests"


def rows_of(
    start: int,
    rows: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    prefix: PrefixHashes | None = None,
    earlier: Earlier | None = None,
    mask: np.ndarray | None = None,
) -> Rows:
    """Of `rows` `[n, H]` and M-RoPE positions int64 `[3, P]`."""
    made = Rows.of(KIND, start, rows, None if positions is None else positions.numpy(), prefix, mask)
    return made if earlier is None else replace(made, earlier=earlier)
