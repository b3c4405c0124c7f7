"""What stages hand to each other: packed rows, alone and with what goes with a request."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from omni_cluster.types.inputs import EXTRA_KEY, StageExtra
from omni_cluster.types.rows import HEADER, Rows, check_together
from tests.fuzz.mutate import changed_bytes, changed_values

MAX_ELEMENTS = 10_000
_NUMBERS = (-1, 0, 1, 2, 5, 8, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_FIRST_NUMBER = 2
"""Of the header's fields, behind the mark and the kind."""


@functools.cache
def _rows(seed: int) -> bytes:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(
        (torch.float32, torch.bfloat16)[seed % 2]
    )
    positions = np.arange(15).reshape(3, 5) if seed % 3 else None
    return Rows.of("of tests", seed, rows, positions).to_bytes()


def rows(rng: Random) -> bytes:
    """Often with another number in the header, which says all that the reader goes by."""
    made = bytearray(_rows(rng.randrange(6)))
    if rng.random() < 0.7:
        fields = list(HEADER.unpack_from(made))
        fields[rng.randrange(_FIRST_NUMBER, len(fields))] = rng.choice(_NUMBERS)
        HEADER.pack_into(made, 0, *fields)
    return bytes(made) if rng.random() < 0.5 else changed_bytes(bytes(made), rng)


def take_rows(data: bytes) -> None:
    taken = Rows.unpack(data, max_elements=MAX_ELEMENTS)
    taken.after(2)
    assert taken.tensor().numel() <= MAX_ELEMENTS


@functools.cache
def _extra() -> Any:
    return StageExtra("key", emit_rows=True, rows=(_rows(0), _rows(5)), pad_row=_rows(1)).to_extra_args()[EXTRA_KEY]


def extra(rng: Random) -> bytes:
    """What goes with a request into its engine, as it comes out of vLLM's own messages."""
    made = changed_values(_extra(), rng)
    if rng.random() < 0.5 and isinstance(made, dict):
        made["rows"] = [rows(rng), rows(rng)]
    try:
        return msgspec.msgpack.encode(made)
    except OverflowError:  # a number that no message holds
        return msgspec.msgpack.encode(_extra())


def take_extra(data: bytes) -> None:
    taken = StageExtra.of({EXTRA_KEY: msgspec.msgpack.decode(data)})
    if taken is None or not taken.rows:
        return
    parts = [Rows.unpack(packed, max_elements=MAX_ELEMENTS) for packed in taken.rows]
    check_together(parts, MAX_ELEMENTS)
    assert sum(part.tensor().numel() for part in parts) <= MAX_ELEMENTS
