from __future__ import annotations

import pytest
import torch

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least


@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 2), (3, 4), (8, 8), (9, None)])
def test_smallest_size_that_is_large_enough(count: int, size: int | None) -> None:
    assert size_at_least(count, (8, 2, 4)) == size


@pytest.mark.gpu
def test_replay_computes_on_what_the_inputs_hold_now() -> None:
    inputs, pool = torch.zeros(4, device="cuda"), GraphPool()
    doubled = CapturedWork(inputs, lambda: inputs * 2, pool)
    squared = CapturedWork(inputs, lambda: inputs**2, pool)
    for value in (3.0, 5.0):
        inputs.fill_(value)
        assert doubled.replay().tolist() == [2 * value] * 4
        assert squared.replay().tolist() == [value**2] * 4
