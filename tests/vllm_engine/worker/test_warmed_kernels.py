"""Which sampling kernels vLLM compiles before requests come, and which are left out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from vllm.model_executor.warmup import jit_warmup_triton_helper
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonCompileKey,
    TritonJitKey,
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.v1.sample.ops import topk_topp_sampler

from omni_cluster.vllm_engine.worker import warmed_kernels
from omni_cluster.vllm_engine.worker.warmed_kernels import AlignedKernel, aligned_only

VOCAB_SIZE = 8448
PATIENCE_S = 60.0


@triton.jit
def _scaled(x_ptr, out_ptr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.load(x_ptr) * FACTOR)


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


class Scaling(VllmTritonJitKernel[int]):
    """A kernel of Triton's for each factor, compiled as vLLM compiles its own on a card: several at once."""

    def get_warmup_keys(self, *, vllm_config: Any) -> list[int]:
        return []

    def warmup_inputs(self, compile_key: int) -> dict[str, Any]:
        return {"factor": compile_key}

    def __call__(self, factor: int) -> None:
        _scaled.warmup(torch.float32, torch.float32, FACTOR=factor, grid=(1,))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton compiles for a card that is not there, and finds nothing that was compiled before."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    # Where there is no card, vLLM has a stand-in for Triton.
    monkeypatch.setattr(jit_warmup_triton_helper, "triton", triton)
    monkeypatch.setattr(jit_warmup_triton_helper, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    _scaled.device_caches.clear()
    yield
    _scaled.device_caches.clear()


@pytest.mark.usefixtures("hopper")
def test_kernels_are_compiled_side_by_side_and_are_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Scaling().compile(1)  # makes what compiles
    stock, both_began = _scaled.compile, threading.Barrier(2, timeout=PATIENCE_S)

    def compile_beside(*args: Any, **kwargs: Any) -> Any:
        both_began.wait()  # breaks where one is compiled after the other
        return stock(*args, **kwargs)

    monkeypatch.setattr(_scaled, "compile", compile_beside)
    AlignedKernel(Scaling()).compile_many([2, 3])
    kernels = _scaled.device_caches[0][0].values()
    assert [kernel.asm["ptx"].count(".entry _scaled") for kernel in kernels] == [1, 1, 1]


@pytest.mark.usefixtures("hopper")
def test_what_triton_cannot_compile_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    Scaling().compile(1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such target")

    monkeypatch.setattr(_scaled, "compile", fail)
    with pytest.raises(ValueError, match="no such target"):
        AlignedKernel(Scaling()).compile_many([4, 5])


@pytest.mark.usefixtures("hopper")
def test_kernels_of_ours_are_compiled_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmed_kernels, "OURS", __name__)
    x = torch.zeros(1)
    with warmed_kernels.compiled_only():
        for factor in (6, 7, 6):
            _scaled[(1,)](x, x, FACTOR=factor)  # a launch would need the card
    kernels = list(_scaled.device_caches[0][0].values())
    assert [kernel.asm["ptx"].count(".entry _scaled") for kernel in kernels] == [1, 1]


@pytest.mark.usefixtures("hopper")
def test_kernels_of_others_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, warmup, **kwargs: launched.append(warmup))
    with warmed_kernels.compiled_only():
        _scaled[(1,)](FACTOR=2)
    _scaled[(1,)](FACTOR=2)
    assert launched == [False, False]
