"""Sampling row by row against vLLM's own filters, and beside neighbours of all kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from omni_cluster.vllm_engine.worker.seeded_noise import SeededNoise, token_seed
from omni_cluster.vllm_engine.worker.top_k_sampler import MAX_K, SampledRows, TopKSampler, within

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


def draw(values: torch.Tensor, rows: Sequence[Row], index: int = 0) -> list[int]:
    """One token a row, as a batch of vLLM's samples them: k and p are there when any row has them."""
    seeds = {at: token_seed(row.seed, index) for at, row in enumerate(rows) if row.seed is not None}
    told = SampledRows(
        np.array([row.top_k for row in rows], dtype=np.int32),
        np.array([row.top_p for row in rows], dtype=np.float32),
        np.array([row.greedy for row in rows]),
        seeds,
    )
    k = torch.tensor(told.top_k) if (told.top_k < VOCAB).any() else None
    p = torch.tensor(told.top_p) if (told.top_p < 1).any() else None
    sampler = TopKSampler(TopKTopPSampler(), lambda: told, SeededNoise(CPU))
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
    made = torch.zeros(3, VOCAB).scatter(1, ids, within(values, k, p))
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


def test_the_noise_is_of_the_seed_and_the_tokens_place_alone() -> None:
    noise, again = SeededNoise(CPU), SeededNoise(CPU)
    noise.drawn(3, 7)
    assert torch.equal(noise.drawn(5, 100), again.drawn(5, 100))
    made = {token_seed(seed, index) for seed in (-1, 0, 1, 2**32, 2**63 - 1, -(2**63)) for index in range(100)}
    assert len(made) == 600 and len({one & 0xFFFFFFFF for one in made}) == 600  # a CPU takes the low half
    assert not torch.equal(noise.drawn(token_seed(1, 0), 100), noise.drawn(token_seed(1, 1), 100))


@pytest.mark.parametrize("rows", [[Row(40), Row(MAX_K + 1)], [Row(), Row()], [Row(top_p=0.5), Row(greedy=True)]])
def test_rows_without_a_seed_and_a_small_top_k_are_vllms(rows: list[Row]) -> None:
    values = torch.full((2, VOCAB), -1e9)
    values[:, 150] = 0.0
    assert draw(values, rows)[0] == 150


def test_rows_that_the_batch_does_not_have_are_vllms() -> None:
    values = torch.full((2, VOCAB), -1e9)
    values[:, 150] = 0.0
    none: Mapping[int, int] = {}
    told = SampledRows(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool), none)
    sampler = TopKSampler(TopKTopPSampler(), lambda: told, SeededNoise(CPU))
    assert sampler(values, {}, torch.tensor([199, 199]), None)[0].tolist() == [150, 150]
