"""What stages hand to each other: packed rows, and tensors with a header."""

from __future__ import annotations

import functools
import struct
from random import Random
from typing import Any

import msgspec
import torch

from omni_cluster.inputs import EXTRA_KEY, StageExtra
from omni_cluster.rows import AdditionalInformationPayload, PromptEmbedsPayload, RowsChunk
from tests.fuzz.mutate import changed_bytes, changed_values

MAX_ELEMENTS = 10_000
_NUMBERS = (-1, 0, 1, 2, 5, 8, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_ODD_HEADER = (*_NUMBERS, [2, 3], [2**40] * 4, [0, 2**40], [2.0, 12], [-1, 4], "int64", "bfloat16", "object", b"")
_TRAILER = struct.Struct("=6q")


@functools.cache
def _rows(seed: int) -> bytes:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(
        (torch.float32, torch.bfloat16)[seed % 2]
    )
    positions = torch.arange(15).view(3, 5) if seed % 3 else None
    return bytes(RowsChunk(seed, rows, positions).pack().numpy())


def rows(rng: Random) -> bytes:
    """Often with another number in the trailer, which says all that the reader goes by."""
    made = bytearray(_rows(rng.randrange(6)))
    if rng.random() < 0.7:
        fields = list(_TRAILER.unpack_from(made, len(made) - _TRAILER.size))
        fields[rng.randrange(6)] = rng.choice(_NUMBERS)
        _TRAILER.pack_into(made, len(made) - _TRAILER.size, *fields)
    return bytes(made) if rng.random() < 0.5 else changed_bytes(bytes(made), rng)


def take_rows(data: bytes) -> None:
    chunk = RowsChunk.unpack(
        torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), max_elements=MAX_ELEMENTS
    )
    chunk.after(2)
    assert chunk.rows.numel() <= MAX_ELEMENTS


@functools.cache
def _extra() -> Any:
    given = StageExtra(
        "key",
        emit_rows=True,
        prompt_embeds=PromptEmbedsPayload.from_tensor(torch.arange(24.0).view(6, 4)),
        additional_information=AdditionalInformationPayload.from_mapping(
            {"positions": torch.arange(18).view(3, 6), "pad_row": torch.ones(4)}
        ),
    )
    return given.to_extra_args()[EXTRA_KEY]


def extra(rng: Random) -> bytes:
    """What goes with a request into its engine, as it comes out of vLLM's own messages."""
    made = changed_values(_extra(), rng)
    if rng.random() < 0.5:
        payload = rng.choice(_headers(made) or [{}])
        payload[rng.choice(("data", "shape", "dtype"))] = rng.choice(_ODD_HEADER)
    try:
        return msgspec.msgpack.encode(made)
    except OverflowError:  # a number that no message holds
        return msgspec.msgpack.encode(_extra())


def _headers(node: object) -> list[dict[str, Any]]:
    """All payloads below."""
    if not isinstance(node, dict):
        return []
    return [node] if "dtype" in node else [found for value in node.values() for found in _headers(value)]


def take_extra(data: bytes) -> None:
    taken = StageExtra.of({EXTRA_KEY: msgspec.msgpack.decode(data)})
    if taken is None or taken.prompt_embeds is None or taken.additional_information is None:
        return
    assert taken.prompt_embeds.to_tensor(max_elements=MAX_ELEMENTS).numel() <= MAX_ELEMENTS
    named = taken.additional_information.to_mapping(max_elements=MAX_ELEMENTS)
    assert sum(tensor.numel() for tensor in named.values()) <= MAX_ELEMENTS
