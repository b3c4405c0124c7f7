from __future__ import annotations

from functools import partial

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


@pytest.mark.gpu
def test_what_only_the_work_holds_stays_its_own() -> None:
    inputs, factor = torch.ones(4, device="cuda"), torch.full((4,), 3.0, device="cuda")
    tripled = CapturedWork(inputs, partial(torch.mul, inputs, factor), GraphPool())
    del factor
    others = [torch.zeros(4, device="cuda") for _ in range(1000)]
    assert tripled.replay().tolist() == [3.0] * 4
    assert not any(other.any() for other in others)
