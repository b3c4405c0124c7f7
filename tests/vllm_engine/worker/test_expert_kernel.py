"""Whether a step waits for the compiler because of how many tokens it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_moe

from omni_cluster.vllm_engine.worker.expert_kernel import COUNTS, compile_for_any_count

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 256, 128, 8


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's kernel, which is put back at the end; where there is no card, vLLM has none of Triton's."""
    kernel = fused_moe.fused_moe_kernel
    kernel = triton.jit(getattr(kernel, "fn", kernel))
    monkeypatch.setattr(fused_moe, "fused_moe_kernel", kernel)
    return kernel


def test_only_the_counts_are_taken_as_they_come(stock: Any) -> None:
    compile_for_any_count()
    params = fused_moe.fused_moe_kernel.params
    assert fused_moe.fused_moe_kernel.fn is stock.fn
    assert [each.name for each in params if each.do_not_specialize_on_alignment] == list(COUNTS)
    assert not any(each.do_not_specialize_on_alignment for each in stock.params)


@pytest.fixture
def card() -> Iterator[torch.device]:
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield torch.device("cuda")


def experts_of(card: torch.device, tokens: int) -> torch.Tensor:
    """The same weights and the same token whatever their number."""
    made = torch.Generator(card).manual_seed(0)
    shape = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    up, down = (torch.randn(s, generator=made, device=card).to(torch.bfloat16) * 0.1 for s in shape)
    token = torch.randn(1, HIDDEN, generator=made, device=card).to(torch.bfloat16)
    ids = torch.arange(TOP_K, device=card, dtype=torch.int32).repeat(tokens, 1)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device=card)
    return fused_moe.fused_experts(token.repeat(tokens, 1), up, down, weights, ids)


def compiled() -> int:
    return sum(len(caches[0]) for caches in fused_moe.fused_moe_kernel.device_caches.values())


@pytest.mark.gpu
def test_an_odd_number_of_tokens_runs_what_an_even_number_compiled(stock: Any, card: torch.device) -> None:
    even = experts_of(card, 600)
    before = compiled()
    experts_of(card, 601)
    assert compiled() > before  # else nothing is left of what this is for
    compile_for_any_count()
    ours = experts_of(card, 600)
    after = compiled()
    odd = experts_of(card, 601)
    assert compiled() == after > 0
    assert torch.equal(ours, even)
    assert torch.equal(odd[:600], even)
