"""Chunks as they travel between replicas."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from omni_cluster.cluster.transport import WireChunk
from omni_cluster.errors import PayloadError
from omni_cluster.outputs import StageChunk
from omni_cluster.payloads import RowsChunk


def travelled(chunk: WireChunk) -> WireChunk:
    """As Ray moves it: arrays out of band, and read-only on the other side."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(chunk, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(message, buffers=[bytes(b.raw()) for b in buffers])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_positions_arrive_as_they_were(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 8).to(dtype)
    positions = torch.arange(12).reshape(3, 4)
    sent = StageChunk(token_start=3, token_ids=(7, 8), text="hi", rows=RowsChunk(0, rows, positions))
    got = travelled(WireChunk.of(sent)).open(1 << 20)
    assert (got.token_start, got.token_ids, got.text) == (3, (7, 8), "hi")
    assert got.rows is not None and got.rows.start == 0
    assert torch.equal(got.rows.rows, rows)
    assert got.rows.positions is not None and torch.equal(got.rows.positions, positions)


def test_rows_travel_as_one_plain_array_beside_the_chunk() -> None:
    wire = WireChunk.of(StageChunk(rows=RowsChunk(0, torch.zeros(4, 8))))
    assert isinstance(wire.packed_rows, np.ndarray) and wire.packed_rows.dtype == np.uint8


def test_a_chunk_without_rows_travels_without_an_array() -> None:
    wire = WireChunk.of(StageChunk(token_ids=(1,)))
    assert wire.packed_rows is None
    assert travelled(wire).open(0) == StageChunk(token_ids=(1,))


def test_more_elements_than_allowed_are_refused() -> None:
    wire = WireChunk.of(StageChunk(rows=RowsChunk(0, torch.zeros(4, 8))))
    wire.open(32)
    with pytest.raises(PayloadError, match="32"):
        wire.open(31)
