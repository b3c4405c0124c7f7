"""Random sampling, row by row the same whatever else is in the batch.

vLLM filters and draws over the whole vocabulary, in some ten kernels a step. With a small top-k all that can be drawn
is known after one selection, and what follows is over a handful of values a request.

vLLM chooses its way for the whole batch, by what any of its requests asks for. Here each row goes its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from omni_cluster.vllm_engine.worker.sampled_rows import MAX_K, SampledRows, on_device


class TopKSampler(nn.Module):
    """In place of vLLM's `TopKTopPSampler`, which it hands all rows to that have neither a small top-k nor a seed.

    What is drawn for a seeded row is a function of its own logits, bounds and seed: a small top-k is drawn among with
    others, one row as every other; from the whole vocabulary a seeded row draws by itself, for vLLM's kernels differ by
    the batch's size and by what its rows ask for. `rows_of_batch` says also which token of the engine's step is made.
    """

    def __init__(self, stock: nn.Module, rows_of_batch: Callable[[], tuple[SampledRows, int]]) -> None:
        super().__init__()
        self._stock = stock
        self._rows_of_batch = rows_of_batch

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 `[n]` drawn from float32 `logits` `[n, vocab]` within `k` and `p` `[n]`."""
        rows, ahead = self._rows_of_batch()
        if len(rows.top_k) != len(logits):  # vLLM's warm-up, of no requests
            return self._stock(logits, generators, k, p)  # type: ignore[no-any-return]
        if rows.all_few:
            return _among_few(logits, k, p, rows, ahead), None
        if not rows.few.any() and not rows.alone:
            return self._stock(logits, {}, k, p)  # type: ignore[no-any-return]
        return self._each_its_way(logits, k, p, rows, ahead), None

    def _each_its_way(
        self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, rows: SampledRows, ahead: int
    ) -> torch.Tensor:
        others = ~rows.few & ~rows.greedy
        others[rows.alone] = False
        drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if rows.few.any():
            places = np.flatnonzero(rows.few)
            at = on_device(places, logits.device)
            drawn[at] = _among_few(logits[at], _of(k, at), _of(p, at), rows.at(places, at), ahead)
        if others.any():
            at = on_device(np.flatnonzero(others), logits.device)
            drawn[at] = self._stock(logits[at], {}, _of(k, at), _of(p, at))[0]
        for row in rows.alone:
            drawn[row : row + 1] = _by_itself(logits, k, p, rows, ahead, row)
        return drawn


def _of(bounds: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor | None:
    return None if bounds is None else bounds[at]


def _among_few(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, rows: SampledRows, ahead: int
) -> torch.Tensor:
    values, ids = logits.topk(min(MAX_K, logits.shape[-1]), dim=-1)
    probabilities = within(values, k if rows.top_k_of_all is None else rows.top_k_of_all, bounding(p, rows))
    # Dividing by exponential noise and taking the largest draws by probability, and waits for nothing. The noise is of
    # the token's id, not of its place: equal logits may come in any order.
    chosen = (probabilities / rows.noise(ids, ahead)).argmax(dim=-1, keepdim=True)
    return ids.gather(1, chosen)[:, 0]


def bounding(p: torch.Tensor | None, rows: SampledRows) -> torch.Tensor | None:
    """`p` as far as it leaves out anything: probabilities may add up to a little more than one."""
    if p is None or True not in rows.bounded:
        return None
    return p.masked_fill(p >= 1, float("inf")) if False in rows.bounded else p


def _by_itself(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, rows: SampledRows, ahead: int, row: int
) -> torch.Tensor:
    own, vocab_size = slice(row, row + 1), logits.shape[-1]
    own_k = k[own] if k is not None and rows.top_k[row] < vocab_size else None
    own_p = p[own] if p is not None and rows.top_p[row] < 1 else None
    probabilities = apply_top_k_top_p(logits[own], own_k, own_p).softmax(dim=-1)
    ids = torch.arange(vocab_size, device=logits.device).unsqueeze(0)
    return (probabilities / rows.at(own, own).noise(ids, ahead)).argmax(dim=-1)


def within(values: torch.Tensor, k: int | torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Probabilities, up to a factor, of descending logits `[n, m]` within top-k and top-p, zero outside.

    It writes over logits outside top-k, which saves a copy. As vLLM's filters: equal logits at the k-th place all stay;
    a token stays while those before it have less than p.
    """
    if k is not None:
        values.masked_fill_(values < _least(values, k), float("-inf"))
    probabilities = values.softmax(dim=-1)
    if p is not None:
        # In float64: CUDA adds up one row in another order than several.
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        probabilities[:, 1:].masked_fill_(sums[:, :-1] >= p.unsqueeze(1), 0.0)
    return probabilities


def _least(values: torch.Tensor, k: int | torch.Tensor) -> torch.Tensor:
    """The k-th of each row, `[n, 1]`."""
    if isinstance(k, int):
        return values[:, k - 1 : k]
    return values.gather(1, k.clamp(max=values.shape[-1]).long().sub_(1).unsqueeze(1))
