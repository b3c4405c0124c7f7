"""Rows as they travel between replicas."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from omni_cluster.cluster.row_objects import RowsItem
from omni_cluster.types.rows import Rows
from tests.rows import rows_of


def travelled(item: RowsItem) -> RowsItem:
    """As Ray moves it: arrays out of band, and read-only on the other side."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(message, buffers=[bytes(b.raw()) for b in buffers])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_positions_arrive_as_they_were(dtype: torch.dtype) -> None:
    sent = rows_of(0, torch.randn(5, 8).to(dtype), torch.arange(12).reshape(3, 4))
    (packed,) = travelled(RowsItem(0, [sent.pack()])).rows
    got = Rows.unpack(packed, max_elements=1 << 20)
    assert got.start == 0 and torch.equal(got.tensor(), sent.tensor())
    assert got.positions is not None and np.array_equal(got.positions, sent.positions)
