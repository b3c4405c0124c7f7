"""Tensors that a model keeps because the next request may need the same, bounded by their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch

Tables = Sequence[torch.Tensor]


class KeptTables:
    """Tables by what they were made for. Those that were used last stay, `max_bytes` of them together.

    A library that counts entries keeps as many large ones as small ones: clients decide how large they are.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tables: OrderedDict[Hashable, Tables] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tables

    def __getitem__(self, key: Hashable) -> Tables:
        self._tables.move_to_end(key)
        return self._tables[key]

    def __setitem__(self, key: Hashable, tables: Tables) -> None:
        """Keeps nothing that is larger than all of them may be."""
        self._drop(key)
        if (num_bytes := _bytes_of(tables)) > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._tables)))
        self._tables[key] = tables
        self.num_bytes += num_bytes

    def _drop(self, key: Hashable) -> None:
        self.num_bytes -= _bytes_of(self._tables.pop(key, ()))


def _bytes_of(tables: Tables) -> int:
    return sum(table.nbytes for table in tables)
