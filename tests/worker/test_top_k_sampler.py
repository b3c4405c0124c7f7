"""Sampling among few tokens against vLLM's own filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from omni_cluster.worker.top_k_sampler import MAX_K, TopKSampler, within

VOCAB = 200


def logits(seed: int, rows: int = 3) -> torch.Tensor:
    """With ties, as half precision makes them."""
    return (4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))).round() / 4


def sampler(*top_k: int) -> TopKSampler:
    return TopKSampler(TopKTopPSampler(), lambda: np.array(top_k, dtype=np.int32))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.05, 1.0))
def test_probabilities_are_those_of_vllms_filters(seed: int, top_k: int, top_p: float) -> None:
    given_logits = logits(seed)
    k, p = torch.full((3,), top_k), torch.full((3,), top_p)
    wanted = apply_top_k_top_p(given_logits.clone(), k, p).softmax(dim=-1)
    values, ids = given_logits.topk(MAX_K)
    made = torch.zeros(3, VOCAB).scatter(1, ids, within(values, k, p))
    made /= made.sum(dim=-1, keepdim=True)
    # Of equal logits at the edge of top-p either may stay: what stays of them is as many, not the same ones.
    torch.testing.assert_close(made.sort().values, wanted.sort().values, atol=1e-5, rtol=0)


def test_each_row_draws_by_its_own_bounds() -> None:
    row = torch.tensor([5.0, 4.0, 3.0, 2.0] + [-20.0] * (VOCAB - 4))
    k, p = torch.tensor([1, 2, 40]), torch.tensor([1.0, 1.0, 0.9])
    drawn = torch.stack([sampler(1, 2, 40)(row.repeat(3, 1), {}, k, p)[0] for _ in range(200)])
    assert set(drawn[:, 0].tolist()) == {0}
    assert set(drawn[:, 1].tolist()) == {0, 1}
    assert set(drawn[:, 2].tolist()) == {0, 1, 2}


def test_draws_follow_the_probabilities() -> None:
    wanted = torch.tensor([0.6, 0.3, 0.1])
    rows = torch.cat([wanted.log(), torch.full((VOCAB - 3,), -50.0)]).repeat(4000, 1)
    drawn, _ = sampler(40)(rows, {}, torch.full((4000,), 40), None)
    shares = torch.bincount(drawn, minlength=3)[:3] / 4000
    torch.testing.assert_close(shares, wanted, atol=0.05, rtol=0)


def test_a_seeded_row_repeats_whatever_else_is_in_the_batch() -> None:
    def drawn(rows: int) -> list[int]:
        generator = torch.Generator().manual_seed(7)
        flat, k = torch.zeros(rows, VOCAB), torch.full((rows,), 40)
        take = sampler(*[40] * rows)
        return [int(take(flat.clone(), {0: generator}, k, None)[0][0]) for _ in range(20)]

    assert drawn(1) == drawn(5) and len(set(drawn(1))) > 3


@pytest.mark.parametrize(("top_k", "k"), [((40, MAX_K + 1), torch.tensor([40, MAX_K + 1])), ((), None), ((40,), None)])
def test_all_else_is_vllms(top_k: tuple[int, ...], k: torch.Tensor | None) -> None:
    rows = torch.full((2, VOCAB), -1e9)
    rows[:, 150] = 0.0
    drawn, _ = sampler(*top_k)(rows, {}, k, None)
    assert drawn.tolist() == [150, 150]
