"""Conditioning rows of what vLLM's prefix cache holds. The cache has a prompt's keys and values, and no rows of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from omni_cluster.payloads import PackedRows

if TYPE_CHECKING:
    import torch

Hashes = Sequence[bytes]
"""vLLM's hashes of a request's full blocks, the first one first: each covers all tokens and media up to its end."""


class KeptRows:
    """Rows of full blocks, uint8 `[block_size, row bytes]`, by the block's hash; `max_bytes` of them at most.

    What was used least recently goes first, and of one request the last block: without the first ones it is of no use.
    """

    def __init__(self, max_bytes: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def covered(self, hashes: Hashes) -> int:
        """How many of these blocks, from the first one on, are here."""
        return sum(1 for _ in takewhile(self._blocks.__contains__, hashes))

    def read(self, hashes: Hashes) -> list[np.ndarray]:
        """The rows of blocks that are all here."""
        self.use(hashes)
        return [self._blocks[each] for each in hashes]

    def keep(self, hashes: Hashes, first: int, rows: np.ndarray) -> None:
        """Copies the rows of a request's blocks from block `first` to the last of `hashes`, as far as there is room."""
        blocks = rows.reshape(len(hashes) - first, self.block_size, -1)
        new = {each: of for each, of in zip(hashes[first:], blocks, strict=True) if each not in self._blocks}
        self._blocks |= new
        self.num_bytes += sum(of.nbytes for of in new.values())
        if self.num_bytes > self._max_bytes:
            self.use(hashes)
            self._drop_surplus()
        self._blocks |= {each: of.copy() for each, of in new.items() if each in self._blocks}

    def use(self, hashes: Hashes) -> None:
        """Marks a request's blocks as just used, the first one last."""
        for each in reversed(hashes):
            if each in self._blocks:
                self._blocks.move_to_end(each)

    def _drop_surplus(self) -> None:
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._blocks.popitem(last=False)[1].nbytes


class EmittedRows:
    """The rows of one request on their way out of the engine: those of its cached blocks go first, and all are kept.

    Rows of a block that is not full yet wait here until it is.
    """

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._cached: list[np.ndarray] = []
        self._waiting: list[np.ndarray] = []
        self._start = 0
        self._end = 0

    def begin(self, hashes: Hashes) -> None:
        """The request is computed from behind these blocks on: for the first time, or again after a preemption."""
        self._cached = self._kept.read(hashes)

    def pass_on(self, hashes: Hashes, packed: torch.Tensor) -> torch.Tensor:
        """A packed chunk of computed rows as it goes on, the first one with those of the cached blocks ahead of it.

        `hashes`: of all blocks whose tokens are known.
        """
        chunk = PackedRows.of(packed)
        self._keep(hashes, chunk)
        if not self._cached or chunk.start != len(self._cached) * self._kept.block_size:
            return packed
        cached, self._cached = self._cached, []
        return chunk.after(cached)

    def _keep(self, hashes: Hashes, chunk: PackedRows) -> None:
        if chunk.start != self._end:  # behind cached blocks, or computed again
            self._waiting, self._start, self._end = [], chunk.start, chunk.start
        fills_block = chunk.end // self._kept.block_size > self._end // self._kept.block_size
        self._waiting.append(chunk.raw)
        self._end = chunk.end
        if fills_block:
            self._keep_full(hashes)

    def _keep_full(self, hashes: Hashes) -> None:
        size = self._kept.block_size
        first, last = -(-self._start // size), min(self._end // size, len(hashes))
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        if first < last:
            self._kept.keep(hashes[:last], first, rows[first * size - self._start : last * size - self._start])
        done = max(self._end // size * size, self._start)
        self._waiting = [rows[done - self._start :].copy()]  # a view would hold all of a long prompt's rows
        self._start = done
