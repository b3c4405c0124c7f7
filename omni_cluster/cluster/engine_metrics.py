"""vLLM's own metrics as Ray's. Imports vLLM: only a stage's replica may, once it has its engine's libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm.v1.metrics.ray_wrappers import RayHistogramWrapper, RayPrometheusStatLogger

LENGTHS: Final = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
"""vLLM counts tokens of requests in as many of these as its `max_model_len` has room for."""


class SameBuckets(RayHistogramWrapper):
    """A histogram whose buckets are those of every engine: Ray has one set a node, and drops what comes in another."""

    def __init__(self, *, buckets: Sequence[float], **named: Any) -> None:
        is_of_lengths = list(buckets) == LENGTHS[: len(buckets)]
        super().__init__(buckets=LENGTHS if is_of_lengths else buckets, **named)


class StageStatLogger(RayPrometheusStatLogger):
    """What an engine's `AsyncLLM` counts by."""

    _histogram_cls = SameBuckets
