"""Sampling without a compiler: no request waits for one."""

from __future__ import annotations

import inspect

from vllm.v1.sample import sampler
from vllm.v1.sample.ops import topk_topp_sampler


def sample_eagerly() -> None:
    """Has vLLM run two functions of its sampler as they are written, in this process.

    It compiles them when a request first asks for log-probabilities, or on a CPU for a temperature: 32 s and 5 s there,
    in which no other request gets a token. They take a few operations over `[requests, vocabulary]`.
    """
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
    topk_topp_sampler.compiled_random_sample = inspect.unwrap(topk_topp_sampler.compiled_random_sample)
