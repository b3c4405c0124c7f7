"""Sampling row by row against vLLM's own filters, and beside neighbours of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from omni_cluster.models.seeded_noise import state_of
from omni_cluster.vllm_engine.worker.sampled_rows import MAX_K, NO_ROWS, SampledRows
from omni_cluster.vllm_engine.worker.top_k_sampler import TopKSampler, bounding, within

VOCAB = 200
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """What one request asks for."""

    top_k: int = VOCAB
    top_p: float = 1.0
    greedy: bool = False
    seed: int | None = None


def logits(seed: int, rows: int = 3) -> torch.Tensor:
    """With ties, as half precision makes them."""
    return (4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))).round() / 4


def told(rows: Sequence[Row], index: int = 0, tokens: int = 1) -> SampledRows:
    bounds = np.array([row.top_k for row in rows], np.int32), np.array([row.top_p for row in rows], np.float32)
    greedy = np.array([row.greedy for row in rows], dtype=bool)
    states = [None if row.seed is None else state_of(row.seed) for row in rows]
    return SampledRows.of(bounds, greedy, states, np.full(len(rows), index), tokens, CPU)


def draw(values: torch.Tensor, rows: Sequence[Row], index: int = 0, ahead: int = 0) -> list[int]:
    """One token a row, as a batch of vLLM's samples them: k and p are there when any row has them."""
    known = told(rows, index, ahead + 1)
    k = torch.tensor(known.top_k) if (known.top_k < VOCAB).any() else None
    p = torch.tensor(known.top_p) if (known.top_p < 1).any() else None
    sampler = TopKSampler(TopKTopPSampler(), lambda: (known, ahead))
    return sampler(values.clone(), {}, k, p)[0].tolist()  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.05, 1.0))
@example(809, 1, 0.33)
def test_probabilities_are_those_of_vllms_filters(seed: int, top_k: int, top_p: float) -> None:
    given_logits = logits(seed)
    k, p = torch.full((3,), top_k), torch.full((3,), top_p)
    sums = apply_top_k_top_p(given_logits.clone(), k, None).softmax(-1).sort(descending=True).values.cumsum(-1)
    # At a border rounding decides, as for a third of three equal logits.
    assume(top_p == 1 or not ((sums - top_p).abs() < 1e-5).any())
    wanted = apply_top_k_top_p(given_logits.clone(), k, p).softmax(dim=-1)
    values, ids = given_logits.topk(MAX_K)
    made = torch.zeros(3, VOCAB).scatter(1, ids, within(values.clone(), k, p))
    made /= made.sum(dim=-1, keepdim=True)
    # Of equal logits at the edge of top-p either may stay: what stays of them is as many, not the same ones.
    torch.testing.assert_close(made.sort().values, wanted.sort().values, atol=1e-5, rtol=0)


def test_each_row_draws_by_its_own_bounds() -> None:
    values = torch.tensor([5.0, 4.0, 3.0, 2.0] + [-20.0] * (VOCAB - 4)).repeat(5, 1)
    rows = [Row(1), Row(2), Row(40, 0.9), Row(greedy=True), Row(100, 0.9, seed=5)]
    drawn = np.array([draw(values, rows, index) for index in range(200)])
    assert [set(column) for column in drawn.T[:3]] == [{0}, {0, 1}, {0, 1, 2}]
    assert set(drawn[:, 4]) == {0, 1, 2}


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("row", [Row(40), Row()])
def test_draws_follow_the_probabilities(row: Row, seeded: bool) -> None:
    wanted = torch.tensor([0.6, 0.3, 0.1])
    values = torch.cat([wanted.log(), torch.full((VOCAB - 3,), -50.0)]).repeat(4000, 1)
    rows = [Row(row.top_k, seed=number if seeded else None) for number in range(4000)]
    shares = torch.bincount(torch.tensor(draw(values, rows)), minlength=3)[:3] / 4000
    torch.testing.assert_close(shares, wanted, atol=0.05, rtol=0)


rows_of_any_kind = st.builds(
    Row,
    top_k=st.sampled_from([1, 5, 40, MAX_K, MAX_K + 1, 150, VOCAB]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    greedy=st.booleans(),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
seeded_rows = st.builds(
    Row,
    top_k=st.sampled_from([1, 5, 40, MAX_K, MAX_K + 1, 150, VOCAB]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    row=seeded_rows,
    neighbours=st.lists(rows_of_any_kind, max_size=5),
    place=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_a_seeded_row_draws_the_same_whatever_is_beside_it(
    row: Row, neighbours: list[Row], place: int, seed: int
) -> None:
    values, others = logits(seed, 1), logits(seed + 1, len(neighbours))
    place = min(place, len(neighbours))
    batch = torch.cat([others[:place], values, others[place:]])
    rows = [*neighbours[:place], row, *neighbours[place:]]
    for index in range(4):
        assert draw(batch, rows, index)[place] == draw(values, [row], index)[0]


@pytest.mark.parametrize("row", [Row(40, 0.9, seed=3), Row(seed=4)])
def test_a_token_is_drawn_the_same_by_a_step_of_its_own_and_by_one_of_several(row: Row) -> None:
    values = logits(5, 1)
    one_each = [draw(values, [row], index) for index in range(20)]
    assert [draw(values, [row], 0, ahead=index) for index in range(20)] == one_each
    assert [draw(values, [row], index - 7, ahead=7) for index in range(20)] == one_each
    assert len(set(map(tuple, one_each))) > 5


def test_a_token_is_drawn_by_its_id_wherever_it_stands_among_equals() -> None:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:MAX_K]
    here, there = told([Row(seed=6)]).noise(ids.unsqueeze(0), 0), told([Row(seed=6)]).noise(ids.flip(0).unsqueeze(0), 0)
    assert torch.equal(here, there.flip(1))


def test_a_row_of_no_top_p_keeps_its_unlikeliest_beside_one_that_has_a_top_p() -> None:
    one = torch.tensor([1.0])

    def alone_of(values: torch.Tensor) -> torch.Tensor:
        return within(values.clone(), 40, bounding(one, told([Row(40)])))

    # What comes before the last ones adds up to one, rounded: as a bound, one would leave them out. Of which logits
    # that is so hangs on how the host rounds.
    steep = (6 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in range(1000))
    rounded = (each.topk(MAX_K).values for each in steep)
    values = next(each for each in rounded if not torch.equal(within(each.clone(), 40, one), alone_of(each)))
    alone = alone_of(values)
    bound = bounding(torch.tensor([1.0, 0.5]), told([Row(40), Row(40, 0.5)]))
    assert torch.equal(within(values.repeat(2, 1), 40, bound)[:1], alone)


@pytest.mark.parametrize("top_k", [1, 7, MAX_K])
def test_a_top_k_of_all_rows_is_the_same_as_one_for_each(top_k: int) -> None:
    values = logits(2).topk(MAX_K).values
    p = torch.tensor([0.3, 0.9, 0.99])
    one_each = torch.full((3,), top_k, dtype=torch.int32)
    assert torch.equal(within(values.clone(), top_k, p), within(values.clone(), one_each, p))


class Operations(TorchDispatchMode):
    """Counts what a card would be given to do: all operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_many_seeded_rows_are_no_more_operations_than_one() -> None:
    counts = {}
    for seeds in ((None,), (1,), (None,) * 32, tuple(range(32)), (None, *range(31))):
        values, rows = logits(1, len(seeds)), told([Row(40, 0.8, seed=seed) for seed in seeds])
        k, p = torch.full((len(seeds),), 40), torch.full((len(seeds),), 0.8)
        sampler = TopKSampler(TopKTopPSampler(), lambda rows=rows: (rows, 0))  # type: ignore[misc]
        with Operations() as operations:
            sampler(values, {}, k, p)
        counts[seeds] = operations.count
    unseeded, one, others, many, mixed = counts.values()
    assert (unseeded, one) == (others, many)
    assert many <= unseeded + 5 and mixed <= many + 4


def test_rows_without_a_seed_beside_seeded_ones_draw_anew_each_time() -> None:
    values = logits(8, 1).repeat(2, 1)
    drawn = [draw(values, [Row(40, seed=1), Row(40)]) for _ in range(30)]
    assert len({one for one, _ in drawn}) == 1 and len({other for _, other in drawn}) > 1


def test_a_vocabulary_smaller_than_the_few_is_drawn_from_whole() -> None:
    rows = told([Row(10, seed=1)], tokens=100)
    ahead = iter(range(100))
    sampler = TopKSampler(TopKTopPSampler(), lambda: (rows, next(ahead)))
    drawn = {sampler(torch.zeros(1, 10), {}, None, None)[0].item() for _ in range(100)}
    assert drawn == set(range(10))


@pytest.mark.parametrize("rows", [[Row(40), Row(MAX_K + 1)], [Row(), Row()], [Row(top_p=0.5), Row(greedy=True)]])
def test_rows_without_a_seed_and_a_small_top_k_are_vllms(rows: list[Row]) -> None:
    values = torch.full((2, VOCAB), -1e9)
    values[:, 150] = 0.0
    assert draw(values, rows)[0] == 150


def test_rows_that_the_batch_does_not_have_are_vllms() -> None:
    values = torch.full((2, VOCAB), -1e9)
    values[:, 150] = 0.0
    sampler = TopKSampler(TopKTopPSampler(), lambda: (NO_ROWS, 0))
    assert sampler(values, {}, torch.tensor([199, 199]), None)[0].tolist() == [150, 150]
