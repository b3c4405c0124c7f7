"""What stages hand to each other: packed rows, tensors with a header, named facts."""

from __future__ import annotations

import functools
import struct
from random import Random

import msgspec
import torch

from omni_cluster.payloads import AdditionalInformationPayload, PromptEmbedsPayload, RowsChunk
from tests.fuzz.mutate import ODD_VALUES, changed_bytes

MAX_ELEMENTS = 10_000
MAX_BYTES = 100_000
_NUMBERS = (-1, 0, 1, 2, 5, 8, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
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


def embeds(rng: Random) -> bytes:
    wire = PromptEmbedsPayload.from_tensor(torch.arange(24.0).view(2, 3, 4)).to_wire()
    if rng.random() < 0.7:
        odd = (*_NUMBERS[:-2], [2, 3], [2**40] * 4, [0, 2**40], [2.0, 12], "int64", "bfloat16", b"", *ODD_VALUES)
        wire[rng.choice(list(wire))] = rng.choice([value for value in odd if _packs(value)])
    data = msgspec.msgpack.encode(wire)
    return data if rng.random() < 0.5 else changed_bytes(data, rng)


def _packs(value: object) -> bool:
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def take_embeds(data: bytes) -> None:
    tensor = PromptEmbedsPayload.decode(data, MAX_BYTES).to_tensor(max_elements=MAX_ELEMENTS)
    assert tensor.numel() <= MAX_ELEMENTS


def facts(rng: Random) -> bytes:
    given = {"positions": torch.arange(12).view(3, 4), "ids": [1, -5, 2**62], "name": "Chelsie"}
    return changed_bytes(AdditionalInformationPayload.from_mapping(given).encode(), rng)


def take_facts(data: bytes) -> None:
    AdditionalInformationPayload.decode(data, MAX_BYTES).to_mapping(max_elements=MAX_ELEMENTS)
