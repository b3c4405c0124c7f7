"""Sampling without a compiler: no request waits for one."""

from __future__ import annotations

import inspect

from vllm.v1.sample import sampler


def sample_eagerly() -> None:
    """Has vLLM run a function of its sampler as it is written, in this process.

    It compiles it when a request first asks for log-probabilities: 32 s on a CPU, in which no other request gets a
    token. It takes a few operations over `[requests, vocabulary]`.
    """
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
