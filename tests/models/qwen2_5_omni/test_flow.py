from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.kernels.cuda_graphs import size_at_least
from omni_cluster.models.qwen2_5_omni.flow import EVALUATIONS, NUM_STEPS, evaluation_times, graph_sizes, time_points

CPU = torch.device("cpu")


def test_times_rise_from_0_to_1_and_are_denser_at_the_start() -> None:
    times = time_points(CPU)
    assert len(times) == NUM_STEPS and times[0] == 0 and abs(times[-1] - 1) < 1e-6
    steps = times.diff()
    assert (steps > 0).all() and (steps.diff() > 0).all()


def test_each_step_is_evaluated_at_both_ends_and_two_thirds_between() -> None:
    times, points = evaluation_times(CPU).view(-1, EVALUATIONS), time_points(CPU)
    torch.testing.assert_close(times[:, 0], points[:-1], atol=0, rtol=0)
    torch.testing.assert_close(times[:, 3], points[1:], atol=0, rtol=0)
    torch.testing.assert_close(times.diff(dim=1), (points.diff() / 3)[:, None].expand(-1, 3))


@given(st.integers(1, 1000))
def test_a_batch_is_filled_up_by_little(max_blocks: int) -> None:
    sizes = graph_sizes(max_blocks)
    assert list(sizes) == sorted(set(sizes)) and max_blocks <= sizes[-1]
    for count in range(2, max_blocks + 1):
        size = size_at_least(count, sizes)
        assert size is not None and count <= size <= max(count + 1, 1.26 * count)
