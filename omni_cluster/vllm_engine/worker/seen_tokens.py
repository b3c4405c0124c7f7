"""The repetition penalty on the device: a row for each request says which tokens it has seen, and a step adds its
sampled tokens where they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm._custom_ops import apply_repetition_penalties


class SeenTokens:
    """One row of `vocab_size` flags for each of up to `max_requests` requests; the others have none."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        # The last row is for requests that are not tracked, the last column for tokens that do not count.
        self._seen = torch.zeros(max_requests + 1, vocab_size + 1, dtype=torch.bool, device=device)
        self._true = torch.ones((), dtype=torch.bool, device=device)  # a Python True would wait for the device
        self._vocab_size = vocab_size
        self._rows: dict[str, int] = {}
        self._free = list(range(max_requests))
        self._batch: list[str] = []
        self._batch_rows = torch.empty(0, dtype=torch.long, device=device)

    def admit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Starts a request over with the tokens it has: those of the prompt, and of the output so far."""
        row = self._rows[request_id] if request_id in self._rows else self._free.pop()
        self._rows[request_id] = row
        self._batch = []
        self._seen[row].zero_().index_fill_(0, self._to_device(list(set(token_ids))), True)

    def remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._batch = []

    def penalise(self, logits: torch.Tensor, request_ids: list[str], penalties: torch.Tensor) -> None:
        """Divides positive logits of seen tokens by the request's penalty, and multiplies negative ones, in place.

        `logits` float32 `[n, vocab_size]`, `penalties` float32 `[n]`.
        """
        seen = self._seen[self._rows_of(request_ids), : self._vocab_size]
        apply_repetition_penalties(logits, seen, seen, penalties)

    def note(self, request_ids: list[str], sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Adds a step's `sampled` tokens, int `[n]`; not those of requests that `discarded`, bool `[n]`, names."""
        tokens = sampled.long().masked_fill(discarded, self._vocab_size)
        self._seen.index_put_((self._rows_of(request_ids), tokens), self._true)

    def _rows_of(self, request_ids: list[str]) -> torch.Tensor:
        if request_ids != self._batch:
            untracked = self._seen.shape[0] - 1
            self._batch_rows = self._to_device([self._rows.get(r, untracked) for r in request_ids])
            self._batch = list(request_ids)
        return self._batch_rows

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        on_host = torch.tensor(numbers, dtype=torch.long, pin_memory=self._seen.is_cuda)
        return on_host.to(self._seen.device, non_blocking=True)

    def __len__(self) -> int:
        return len(self._rows)
