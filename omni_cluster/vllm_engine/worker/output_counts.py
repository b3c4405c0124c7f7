"""The presence and the frequency penalty on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class OutputCounts:
    """How often each request has made each token; only of requests that one of the two penalties changes.

    Each has a row of its own while it runs, int32 `[vocab_size + 1]`: few ask for it, and the others pay nothing.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[str, torch.Tensor] = {}
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def admit(self, request_id: str, output_ids: Sequence[int]) -> None:
        """Starts a request over with the tokens that it has made so far."""
        size = self._vocab_size + 1  # the last place: tokens that do not count
        counts = torch.zeros(size, dtype=torch.int32, device=self._device)
        if output_ids:
            counts += torch.bincount(torch.tensor(output_ids), minlength=size).to(self._device)
        self._counts[request_id] = counts

    def remove(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    def penalise(
        self, logits: torch.Tensor, request_ids: Sequence[str], frequency: torch.Tensor, presence: torch.Tensor
    ) -> None:
        """Lowers the logits of tokens that were made, in place.

        `logits` float32 `[n, vocab_size]`; `frequency` for each time, `presence` once, float32 `[n]`.
        """
        for row, counts in self._rows(request_ids):
            own, made = logits[row], counts[: self._vocab_size]
            own.sub_(frequency[row] * made)
            own.sub_(presence[row] * (made > 0))

    def note(self, request_ids: Sequence[str], sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Adds a step's `sampled` tokens, int `[n]`; not those of requests that `discarded`, bool `[n]`, names."""
        if not self._counts:
            return
        tokens = sampled.long().masked_fill(discarded, self._vocab_size)
        for row, counts in self._rows(request_ids):
            counts.index_add_(0, tokens[row : row + 1], self._one)

    def _rows(self, request_ids: Sequence[str]) -> list[tuple[int, torch.Tensor]]:
        return [(row, self._counts[r]) for row, r in enumerate(request_ids) if r in self._counts]

    def __len__(self) -> int:
        return len(self._counts)
