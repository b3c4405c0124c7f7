from __future__ import annotations

import pytest
import torch

from omni_cluster.vllm_engine.worker.finite import finite_logits, finite_rows


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_one_value_that_is_not_finite_is_told_from_others(value: float) -> None:
    rows = torch.zeros(3, 64)
    rows[1, 17] = value
    assert finite_rows(rows).tolist() == [True, False, True]


def test_a_row_whose_sum_is_past_float16_is_finite() -> None:
    assert finite_rows(torch.full((1, 64), 60_000.0, dtype=torch.float16)).tolist() == [True]


def test_logits_are_finite_where_none_is_nan_or_plus_infinity_and_tokens_may_be_ruled_out() -> None:
    ruled_out = torch.full((5, 8), -torch.inf)
    ruled_out[:4, 3] = 1.0
    ruled_out[1, 5] = torch.nan
    ruled_out[2, 5] = torch.inf
    assert finite_logits(ruled_out).tolist() == [True, False, False, True, True]
