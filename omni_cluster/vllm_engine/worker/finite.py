"""Which requests of a step have values that are infinite or no numbers.

Attention carries such a value on to each later position of its request: a weight times NaN is NaN, also where the
weight is zero. So the logits of a step tell of all positions that were computed before.
"""

from __future__ import annotations

import torch


def finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """Of rows `[n, H]`: bool `[n]`, whether all values are finite. In float32, for a sum may be past float16."""
    return rows.sum(dim=-1, dtype=torch.float32).isfinite()


def finite_logits(logits: torch.Tensor) -> torch.Tensor:
    """Of logits `[n, vocab_size]`: bool `[n]`. Minus infinity, which ruled-out tokens have, counts as finite."""
    return logits.amax(dim=-1) < torch.inf
