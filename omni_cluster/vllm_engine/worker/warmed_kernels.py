"""Triton's kernels that are compiled before a request can need them: side by side, and no others.

vLLM compiles each of its sampling kernels twice: for logits whose rows begin at multiples of 16 values, and for logits
whose rows do not. Rows are as far apart as the vocabulary is long, or as its padded embedding is, whose length is a
multiple of 64. Ours are compiled in threads, as vLLM's are: one after another they took 14 s of a first start on the
host of an H200, as it came to the steps that use them.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.sample.ops import topk_topp_sampler

from omni_cluster.vllm_engine.install import replaced

ALIGNED_VALUES = 16
"""By which Triton tells integers apart: those that it divides, and the others."""
OURS = f"{__name__.partition('.')[0]}."
"""Modules of kernels whose launch may be left out: others' results may be where something is written to."""
MIN_COMPILERS, MAX_COMPILERS = 2, 8
"""Threads. Triton's assembler is a process; Python's lock is held for an eighth of a compilation, by Triton 3.6 longer.
"""


class AlignedKernel:
    """One of the sampler's kernels, without what is compiled for rows that no logits of the vocabulary have.

    All else stays: no request waits for a compiler.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def get_warmup_keys(self, *, vllm_config: Any) -> list[Any]:
        keys: list[Any] = self._kernel.get_warmup_keys(vllm_config=vllm_config)
        if vllm_config.model_config.get_vocab_size() % ALIGNED_VALUES:
            return keys
        return [key for key in keys if dict(key.inputs)["logits"].stride(0) % ALIGNED_VALUES == 0]

    def compile_many(self, keys: Iterable[Any]) -> None:
        with one_parse_at_a_time():  # vLLM compiles side by side by itself
            self._kernel.compile_many(keys)


@contextmanager
def side_by_side() -> Iterator[None]:
    """What Triton is asked to compile inside is compiled in threads. At the end it is there, or an error is raised."""
    threads = min(max(MIN_COMPILERS, len(os.sched_getaffinity(0))), MAX_COMPILERS)
    with one_parse_at_a_time(), ThreadPoolExecutor(threads) as compilers, AsyncCompileMode(compilers):
        yield


@contextmanager
def one_parse_at_a_time() -> Iterator[None]:
    """Python 3.11 counts the depth of syntax trees for all threads together, and fails where two are made at once."""
    lock, stock = threading.Lock(), JITFunction.parse

    def parse(kernel: JITFunction) -> ast.AST:
        with lock:
            return stock(kernel)

    with replaced(JITFunction, "parse", parse):
        yield


@contextmanager
def compiled_only() -> Iterator[None]:
    """Kernels of ours that are launched inside are compiled in place of that. What they would have made is chance."""
    stock = JITFunction.run

    def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return stock(kernel, *args, warmup=warmup or kernel.fn.__module__.startswith(OURS), **kwargs)

    with replaced(JITFunction, "run", run), side_by_side():
        yield


@contextmanager
def aligned_only() -> Iterator[None]:
    """Samplers that vLLM constructs inside register no more than they can run."""
    stock = topk_topp_sampler.register_top_k_top_p_warmups

    def register() -> None:
        registry = JitWarmupRegistry(None)
        with registry.activate():
            stock()
        for kernel in registry._registrations:
            JitWarmupRegistry.register(AlignedKernel(kernel))

    with replaced(topk_topp_sampler, "register_top_k_top_p_warmups", register):
        yield
