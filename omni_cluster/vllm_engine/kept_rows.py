"""Conditioning rows of what vLLM's prefix cache holds. The cache has a prompt's keys and values, and no rows of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np
import torch

from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.holders import Holders
from omni_cluster.vllm_engine.rows_at import unless_all

Hashes = Sequence[bytes]
"""vLLM's hashes of a request's full blocks, the first one first: each covers all tokens and media up to its end."""


LEAST_LEFT_OUT = 256
"""Positions of a prompt whose rows are left out at least: to ask for few rows takes longer than to send them."""


class KeptRows:
    """An LRU cache of full blocks' rows, uint8 `[n, row bytes]`, by the block's hash; `max_bytes` at most.

    Of one request the last block goes first: without the first ones it is of no use. Blocks that a request holds are
    pinned. Announced blocks are those whose rows went out as a part of some prompt: their reader may have what it made
    of them.
    """

    def __init__(self, max_bytes: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._held: dict[bytes, np.ndarray] = {}
        """Those that requests hold are here, and not in `_blocks`."""
        self._holders: Holders[bytes] = Holders()
        self._announced: set[bytes] = set()

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks or name in self._held

    def covered(self, hashes: Hashes) -> int:
        """How many of these blocks, from the first one on, are here."""
        return sum(1 for _ in takewhile(self.__contains__, hashes))

    def announced(self, hashes: Hashes) -> int:
        """How many of these blocks, from the first one on, are announced."""
        return sum(1 for _ in takewhile(self._announced.__contains__, hashes))

    def announce(self, hashes: Hashes) -> None:
        """Marks blocks, as far as they are here, as announced."""
        self._announced.update(filter(self.__contains__, hashes))

    def read(self, hashes: Hashes) -> list[np.ndarray]:
        """The rows of blocks that are all here."""
        self.use(hashes)
        return self._rows(hashes)

    def _rows(self, hashes: Hashes) -> list[np.ndarray]:
        return [self._held[each] if each in self._held else self._blocks[each] for each in hashes]

    def find(self, hashes: Hashes) -> np.ndarray | None:
        """The rows of blocks one after another, uint8 `[rows, row bytes]`; None if one is not here."""
        if not hashes or self.covered(hashes) < len(hashes):
            return None
        return np.concatenate(self._rows(hashes))

    def hold(self, hashes: Hashes) -> None:
        """Blocks that are all here stay until as many have let go of them as held them."""
        for each in hashes:
            if each in self._blocks:
                self._held[each] = self._blocks.pop(each)
        self._holders.hold(hashes)

    def let_go(self, hashes: Hashes) -> None:
        for each in self._holders.let_go(hashes):
            self._blocks[each] = self._held.pop(each)

    def keep(self, hashes: Hashes, blocks: Sequence[np.ndarray]) -> None:
        """Copies the rows of a request's `blocks`, the last of `hashes`, as far as there is room."""
        last = hashes[len(hashes) - len(blocks) :]
        new = {each: of for each, of in zip(last, blocks, strict=True) if len(of) and each not in self}
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
        while self.num_bytes > self._max_bytes:  # what is held was within the bound before it was held
            dropped, rows = self._blocks.popitem(last=False)
            self._announced.discard(dropped)
            self.num_bytes -= rows.nbytes


class EmittedRows:
    """The rows of one request on their way out of the engine: those of its cached blocks go first, and all are kept.

    Of the prompt's first blocks that are announced, `least_left_out` of them or more, no rows go out: a reader that
    lacks them asks. Rows of a block that is not full yet wait here until it is.
    """

    def __init__(
        self, kept: KeptRows, prompt_blocks: int = 0, least_left_out: int = 0, mask: np.ndarray | None = None
    ) -> None:
        """`prompt_blocks`: the full blocks of the prompt; `least_left_out`: 0 if the rows of all are to go out.

        `mask` bool `[P]`: which positions of the prompt have rows, and none behind it; None: all positions have.
        """
        self._kept = kept
        self._mask = mask
        self._prompt_blocks = prompt_blocks
        self._least_left_out = least_left_out
        self._left_out: Hashes = ()
        self._has_begun = False
        self._first = 0
        self._behind = 0
        """Rows of cached blocks, at the positions between, are to go out ahead of those that are computed behind."""
        self._cached: list[np.ndarray] = []
        self._waiting: list[np.ndarray] = []
        """Rows from position `_start` on, up to `_end`, which are of no kept block yet."""
        self._start = self._end = 0

    def covered(self, hashes: Hashes) -> int:
        """How many of these blocks, from the first one on, need not be computed for their rows."""
        if self._mask is not None and self._end < len(self._mask):
            # Cached rows go out with computed ones: a part of the prompt is computed.
            hashes = hashes[: (len(self._mask) - 1) // self._kept.block_size]
        lacking = (i for i, name in enumerate(hashes) if self._has_rows(i) and name not in self._kept)
        return next(lacking, len(hashes))

    def _has_rows(self, number: int) -> bool:
        """Whether any position of the block has."""
        size = self._kept.block_size
        return self._mask is None or bool(self._mask[number * size : (number + 1) * size].any())

    def begin(self, hashes: Hashes) -> None:
        """The request is computed from behind these blocks on: for the first time, or again after a preemption."""
        first = 0  # the reader of one that has begun before counts on all rows behind the first that went out
        if not self._has_begun:
            announced = self._kept.announced(hashes[: self._prompt_blocks])
            first = announced if 0 < self._least_left_out <= announced else 0
            self._left_out = hashes[:first]
            self._kept.hold(self._left_out)  # for a reader that lacks them
        numbers = filter(self._has_rows, range(first, len(hashes)))
        self._cached = self._kept.read([hashes[number] for number in numbers])
        self._first, self._behind = first * self._kept.block_size, len(hashes) * self._kept.block_size
        self._has_begun = True
        self._kept.use(hashes)
        self._kept.announce(hashes[: self._prompt_blocks])

    def end(self, hashes: Hashes) -> None:
        """The request is over, also if it never began. `hashes`: of all its blocks."""
        self._kept.let_go(self._left_out)
        self._kept.use(hashes)
        self._left_out = ()

    def pass_on(self, hashes: Hashes, packed: torch.Tensor) -> torch.Tensor:
        """Packed rows that were computed as they go on, the first ones with those of the cached blocks ahead of them.

        `hashes`: of all blocks whose tokens are known.
        """
        computed = Rows.unpack(packed.numpy(), max_elements=None)
        self._keep(hashes, computed)
        if self._first == self._behind or computed.start != self._behind:
            return packed
        mask = unless_all(None if self._mask is None else self._mask[self._first : self._behind])
        cached, self._cached, self._first = self._cached, [], self._behind
        return torch.from_numpy(computed.preceded_by(cached, mask).pack())

    def _keep(self, hashes: Hashes, computed: Rows) -> None:
        if computed.start != self._end:  # behind cached blocks, or computed again
            self._waiting, self._start, self._end = [], computed.start, computed.start
        fills_block = computed.end // self._kept.block_size > self._end // self._kept.block_size
        self._waiting.append(computed.raw)
        self._end = computed.end
        if fills_block:
            self._keep_full(hashes)

    def _keep_full(self, hashes: Hashes) -> None:
        size = self._kept.block_size
        first, last = -(-self._start // size), min(self._end // size, len(hashes))
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        if first < last:
            ends = [self._row_number(block * size) for block in range(first, last + 1)]
            self._kept.keep(hashes[:last], [rows[begin:end] for begin, end in pairwise(ends)])
            self._kept.announce(hashes[first : min(last, self._prompt_blocks)])
        done = max(self._end // size * size, self._start)
        # A view would hold all of a long prompt's rows.
        self._waiting, self._start = [rows[self._row_number(done) :].copy()], done

    def _row_number(self, position: int) -> int:
        """How many rows that wait are of positions before this one."""
        return position - self._start if self._mask is None else int(self._mask[self._start : position].sum())
