"""The conditioning rows that one step adds to its token embeddings, gathered from what each request was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_cluster.inputs import StageExtra
from omni_cluster.rows import Rows, check_together


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The positions of one request that one step computes: `[start, start + length)`."""

    request_id: str
    start: int
    length: int


NOWHERE = 1 << 62
"""A position behind all rows, for a request that a step computes to no effect."""


@dataclass(frozen=True, slots=True)
class OmniModelInputForGPU:
    """What a step feeds beside vLLM's own inputs. `rows`: `[num_tokens, H]` on the host, in the batch's order.

    `changed`: False when they are those of the step before, as in a batch whose requests are all past their last rows.
    """

    rows: torch.Tensor
    changed: bool = True


class RequestRows:
    """The rows of one request, growing while it decodes; positions past the last row take the pad row.

    The first row is that of position `start`; the KV cache has what is before it.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        pad_row: torch.Tensor,
        positions: torch.Tensor | None,
        expected: int = 0,
        start: int = 0,
    ) -> None:
        """`expected`: how many rows will come at least, for which there is room from the start."""
        self._start = start
        self._length = rows.shape[0]
        self._rows = rows
        self._reserve(expected)
        self._pad_row = pad_row[None]
        self.positions = positions

    def append(self, rows: torch.Tensor) -> None:
        end = self._length + rows.shape[0]
        if end > self._rows.shape[0]:
            self._reserve(max(end, 2 * self._rows.shape[0]))
        self._rows[self._length : end] = rows
        self._length = end

    def _reserve(self, number: int) -> None:
        if number > self._rows.shape[0]:
            grown = self._rows.new_empty(number, self._rows.shape[1])
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown

    def only_pads(self, span: TokenSpan) -> bool:
        return span.start >= self._start + self._length

    def pieces(self, span: TokenSpan) -> list[torch.Tensor]:
        """The span's rows, as views of at most two tensors."""
        first = span.start - self._start
        if first < 0:
            raise RuntimeError(f"position {span.start} is to be computed, but the rows begin at {self._start}")
        end = first + span.length
        if end <= self._length:
            return [self._rows[first:end]]
        pads = self._pad_row.expand(end - max(first, self._length), -1)
        return [pads] if self.only_pads(span) else [self._rows[first : self._length], pads]


class OmniModelInputBuilder:
    """Keeps the rows of all requests of a runner and lays out those that a step needs.

    `staging` `[n, H]` is reused by every step: the runner must have finished the copy of the step before, which vLLM's
    `synchronize_input_prep` gives. Its further steps come behind it, so n is what all of them take together.
    """

    def __init__(self, staging: torch.Tensor, max_elements: int) -> None:
        self._staging = staging
        self._max_elements = max_elements
        self._requests: dict[str, RequestRows] = {}
        self._no_row = staging.new_zeros(1, staging.shape[1])
        self._padded: list[tuple[str, int]] = []
        self._staged = 0

    def admit(self, request_id: str, extra: StageExtra, expected: int = 0) -> None:
        """Takes a new request's first rows of `expected` ones, or more; one that comes again keeps those it has."""
        if not extra.rows or request_id in self._requests:
            return
        parts = [Rows.unpack(packed, max_elements=self._max_elements) for packed in extra.rows]
        check_together(parts, self._max_elements)
        first, *others = parts
        request = RequestRows(
            self._staged_rows(first),
            self._pad_row(extra, first.width),
            None if first.positions is None else torch.from_numpy(first.positions),
            expected - first.start,
            first.start,
        )
        for rows in others:
            request.append(self._staged_rows(rows))
        self._requests[request_id] = request

    def _staged_rows(self, rows: Rows) -> torch.Tensor:
        return rows.tensor().to(self._staging.dtype)

    def _pad_row(self, extra: StageExtra, width: int) -> torch.Tensor:
        if not extra.pad_row:
            return self._staging.new_zeros(width)
        return self._staged_rows(Rows.unpack(extra.pad_row, max_elements=self._max_elements))[0]

    def push(self, request_id: str, rows: torch.Tensor) -> None:
        """Appends rows to a request; those of a request that ended meanwhile are dropped."""
        request = self._requests.get(request_id)
        if request is not None:
            request.append(rows)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def positions(self, request_id: str) -> torch.Tensor | None:
        """The M-RoPE positions `[3, P]` that came with the request, None where vLLM's own serve."""
        request = self._requests.get(request_id)
        return None if request is None else request.positions

    def build(self, spans: Sequence[TokenSpan], *, is_further: bool = False) -> OmniModelInputForGPU:
        """Rows of every position of the step; zero for requests that brought none.

        `is_further`: what was built before is still on its way to the device.
        """
        first = self._staged if is_further else 0
        num_tokens = sum(span.length for span in spans)
        padded = [(span.request_id, span.length) for span in spans if self._only_pads(span)]
        unchanged = len(padded) == len(spans) and padded == self._padded
        self._padded = padded if len(padded) == len(spans) else []
        self._staged = first + num_tokens
        rows = self._staging[first : self._staged]
        if not unchanged:
            torch.cat([piece for span in spans for piece in self._pieces(span)], out=rows)
        return OmniModelInputForGPU(rows, not unchanged)

    def _only_pads(self, span: TokenSpan) -> bool:
        request = self._requests.get(span.request_id)
        return request is not None and request.only_pads(span)

    def _pieces(self, span: TokenSpan) -> list[torch.Tensor]:
        request = self._requests.get(span.request_id)
        return [self._no_row.expand(span.length, -1)] if request is None else request.pieces(span)

    def __len__(self) -> int:
        return len(self._requests)
