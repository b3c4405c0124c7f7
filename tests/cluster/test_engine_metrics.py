"""vLLM's metrics as Ray's: engines of different lengths have the same buckets."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.buckets import histogram_buckets

from omni_cluster.cluster.metrics import LENGTHS, engine_stat_logger

Histogram = engine_stat_logger()._histogram_cls  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_model_len", [128, 4096, 32_768, 499_999])
def test_buckets_of_lengths_are_those_of_every_engine(max_model_len: int) -> None:
    buckets = histogram_buckets("request_tokens", max_model_len=max_model_len)
    made = Histogram(name="vllm:tokens", documentation="", labelnames=["engine"], buckets=buckets)
    assert made.metric.boundaries == LENGTHS != buckets


def test_other_buckets_stay_as_they_are() -> None:
    buckets = histogram_buckets("time_to_first_token")
    made = Histogram(name="vllm:first", documentation="", labelnames=["engine"], buckets=buckets)
    assert made.metric.boundaries == buckets
