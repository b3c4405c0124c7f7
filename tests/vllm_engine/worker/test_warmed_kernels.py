"""Which sampling kernels vLLM compiles before requests come, and which are left out."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel
from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonCompileKey, TritonJitKey, TritonWarmupTensor
from vllm.v1.sample.ops import topk_topp_sampler

from omni_cluster.vllm_engine.worker.warmed_kernels import aligned_only

VOCAB_SIZE = 8448


class Sampling(VllmJitKernel[TritonCompileKey]):
    """As vLLM's, which tell their keys on a card only: one for rows that are aligned, and one for others."""

    def __init__(self) -> None:
        self.strides: list[int] = []

    def get_warmup_keys(self, *, vllm_config: Any) -> list[TritonCompileKey]:
        return [self._key(stride, vllm_config.model_config.get_vocab_size()) for stride in (16, 2)]

    @staticmethod
    def _key(stride: int, vocab_size: int) -> TritonCompileKey:
        logits = TritonWarmupTensor(torch.float32, shape=(2, vocab_size), strides=(stride, 1))
        jit_key = TritonJitKey(stride, stride, 0, stride)
        return TritonCompileKey(frozenset([jit_key]), (("logits", logits), ("k", None)))

    def compile(self, compile_key: TritonCompileKey) -> None:
        self.strides.append(dict(compile_key.inputs)["logits"].stride(0))

    def compile_many(self, compile_keys: Iterable[TritonCompileKey]) -> None:
        for key in compile_keys:
            self.compile(key)


@pytest.mark.parametrize(("vocab_size", "strides"), [(VOCAB_SIZE, [16]), (VOCAB_SIZE + 8, [16, 2])])
def test_kernels_for_rows_that_no_logits_have_are_left_out(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, strides: list[int]
) -> None:
    monkeypatch.setattr("vllm.distributed.is_global_first_rank", lambda: False)  # no bar, and no group of processes
    sampling = Sampling()
    monkeypatch.setattr(topk_topp_sampler, "register_top_k_top_p_warmups", sampling.register_warmup)
    registry = JitWarmupRegistry(SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size)))
    with registry.activate(), aligned_only():
        topk_topp_sampler.register_top_k_top_p_warmups()
    registry.warmup()
    assert sampling.strides == strides
