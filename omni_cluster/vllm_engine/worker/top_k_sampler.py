"""Random sampling, row by row the same whatever else is in the batch.

vLLM filters and draws over the whole vocabulary, in some ten kernels a step. With a small top-k all that can be drawn
is known after one selection, and what follows is over a handful of values a request.

vLLM chooses its way for the whole batch, by what any of its requests asks for. Here each row goes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from omni_cluster.vllm_engine.worker.seeded_noise import SeededNoise

MAX_K = 64


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What the host knows of the batch's rows.

    `top_k` int `[n]`, the vocabulary's size for a row without; `top_p` float `[n]`; `greedy` bool `[n]`: rows whose
    draw nobody looks at. `seeds`: by row, what a repeatable request draws its next token from.
    """

    top_k: np.ndarray
    top_p: np.ndarray
    greedy: np.ndarray
    seeds: Mapping[int, int]

    def among_few(self, vocab_size: int) -> np.ndarray:
        """Bool `[n]`: rows that draw among `MAX_K` tokens at most, and greedy ones, which may go along."""
        few = (self.top_k <= MAX_K) & (vocab_size >= MAX_K) & ~self.greedy
        return few | self.greedy if few.any() else few

    def alone(self, few: np.ndarray) -> list[int]:
        """Seeded rows that draw from the whole vocabulary."""
        return [row for row in self.seeds if not few[row] and not self.greedy[row]]


class TopKSampler(nn.Module):
    """In place of vLLM's `TopKTopPSampler`, which it hands all rows to that have neither a small top-k nor a seed.

    What is drawn for a seeded row is a function of its own logits, bounds and seed: a small top-k is drawn among with
    others, one row as every other; from the whole vocabulary a seeded row draws by itself, for vLLM's kernels differ by
    the batch's size and by what its rows ask for.
    """

    def __init__(self, stock: nn.Module, rows_of_batch: Callable[[], SampledRows], noise: SeededNoise) -> None:
        super().__init__()
        self._stock = stock
        self._rows_of_batch = rows_of_batch
        self._noise = noise

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 `[n]` drawn from float32 `logits` `[n, vocab]` within `k` and `p` `[n]`."""
        rows = self._rows_of_batch()
        if len(rows.top_k) != len(logits):  # vLLM's warm-up, of no requests
            return self._stock(logits, generators, k, p)  # type: ignore[no-any-return]
        few = rows.among_few(logits.shape[-1])
        alone = rows.alone(few)
        if k is not None and few.all():
            return self._among_few(logits, k, p, rows.seeds), None
        if not few.any() and not alone:
            return self._stock(logits, {}, k, p)  # type: ignore[no-any-return]
        return self._each_its_way(logits, k, p, rows), None

    def _each_its_way(
        self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, rows: SampledRows
    ) -> torch.Tensor:
        few = rows.among_few(logits.shape[-1])
        alone = rows.alone(few)
        others = ~few & ~rows.greedy
        others[alone] = False
        drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if k is not None and few.any():
            places = np.flatnonzero(few)
            seeds = {at: rows.seeds[row] for at, row in enumerate(places.tolist()) if row in rows.seeds}
            at = _on(logits.device, places)
            drawn[at] = self._among_few(logits[at], k[at], None if p is None else p[at], seeds)
        if others.any():
            at = _on(logits.device, np.flatnonzero(others))
            drawn[at] = self._stock(logits[at], {}, *(None if bound is None else bound[at] for bound in (k, p)))[0]
        for row in alone:
            drawn[row : row + 1] = self._by_itself(logits, k, p, rows, row)
        return drawn

    def _among_few(
        self, logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None, seeds: Mapping[int, int]
    ) -> torch.Tensor:
        values, ids = logits.topk(MAX_K, dim=-1)
        probabilities = within(values, k.clamp(max=MAX_K), p)
        noise = torch.empty_like(probabilities).exponential_()
        for row, seed in seeds.items():
            # By the token's id, not by its place: equal logits may come in any order.
            noise[row] = self._noise.drawn(seed, logits.shape[-1])[ids[row]]
        # Dividing by exponential noise and taking the largest draws by probability, and waits for nothing.
        chosen = (probabilities / noise).argmax(dim=-1, keepdim=True)
        return ids.gather(1, chosen)[:, 0]

    def _by_itself(
        self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, rows: SampledRows, row: int
    ) -> torch.Tensor:
        own, vocab_size = slice(row, row + 1), logits.shape[-1]
        own_k = k[own] if k is not None and rows.top_k[row] < vocab_size else None
        own_p = p[own] if p is not None and rows.top_p[row] < 1 else None
        probabilities = apply_top_k_top_p(logits[own], own_k, own_p).softmax(dim=-1)
        return (probabilities / self._noise.drawn(rows.seeds[row], vocab_size)).argmax(dim=-1)


def within(values: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
    """Probabilities, up to a factor, of descending logits `[n, MAX_K]` within top-k and top-p, zero outside.

    As vLLM's filters: equal logits at the k-th place all stay; a token stays while those before it have less than p.
    """
    least = values.gather(1, (k.long() - 1).unsqueeze(1))
    probabilities = values.masked_fill(values < least, float("-inf")).softmax(dim=-1)
    if p is None:
        return probabilities
    # In float64: CUDA adds up one row in another order than several.
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    return probabilities.masked_fill(before >= p.unsqueeze(1), 0.0)


def _on(device: torch.device, places: np.ndarray) -> torch.Tensor:
    on_host = torch.from_numpy(places)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
