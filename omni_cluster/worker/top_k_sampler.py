"""Random sampling among few tokens.

vLLM filters and draws over the whole vocabulary, in some ten kernels a step. With a small top-k all that can be drawn
is known after one selection, and what follows is over a handful of values a request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

MAX_K = 64


class TopKSampler(nn.Module):
    """In place of vLLM's `TopKTopPSampler`, which it hands everything else to.

    `top_k_of_batch`: the top-k of each request of the batch, on the host.
    """

    def __init__(self, stock: nn.Module, top_k_of_batch: Callable[[], np.ndarray]) -> None:
        super().__init__()
        self._stock = stock
        self._top_k_of_batch = top_k_of_batch

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 `[n]` drawn from float32 `logits` `[n, vocab]` within `k` and `p` `[n]`; `generators` by row."""
        if k is None or not self._all_small(logits.shape[-1]):
            return self._stock(logits, generators, k, p)
        values, ids = logits.topk(MAX_K, dim=-1)
        probabilities = within(values, k, p)
        noise = torch.empty_like(probabilities).exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        # Dividing by exponential noise and taking the largest draws by probability, and waits for nothing.
        chosen = (probabilities / noise).argmax(dim=-1, keepdim=True)
        return ids.gather(1, chosen)[:, 0], None

    def _all_small(self, vocab_size: int) -> bool:
        top_k = self._top_k_of_batch()
        return len(top_k) > 0 and int(top_k.max()) <= MAX_K <= vocab_size


def within(values: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
    """Probabilities, up to a factor, of descending logits `[n, MAX_K]` within top-k and top-p, zero outside.

    As vLLM's filters: equal logits at the k-th place all stay; a token stays while those before it have less than p.
    """
    least = values.gather(1, (k.long() - 1).unsqueeze(1))
    probabilities = values.masked_fill(values < least, float("-inf")).softmax(dim=-1)
    if p is None:
        return probabilities
    before = probabilities.cumsum(dim=-1) - probabilities
    return probabilities.masked_fill(before >= p.unsqueeze(1), 0.0)
