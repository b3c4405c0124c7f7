"""What vLLM's products of LoRA adapters on a CPU make of tokens without one."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from omni_cluster.vllm_engine.worker.cpu_lora import spare_the_base_model


@pytest.fixture
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own are back afterwards."""
    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", lora_ops.bgmv_shrink)
    spare_the_base_model()
    spare_the_base_model()


def test_tokens_without_an_adapter_stay_as_they_are(spared: None) -> None:
    random = torch.Generator().manual_seed(0)
    inputs, a, b = (torch.randn(shape, generator=random) for shape in ((3, 8), (2, 1, 4, 8), (2, 1, 8, 4)))
    indices, low, out = torch.tensor([1, -1, 0]), torch.ones(3, 4), torch.zeros(3, 8)
    punica_cpu.bgmv_shrink(inputs, a, low, indices, 0.5)
    lora_ops.bgmv_expand(low, b, out, indices)
    wanted = [0.5 * b[i, 0] @ (a[i, 0] @ x) if i >= 0 else torch.zeros(8) for i, x in zip(indices, inputs, strict=True)]
    torch.testing.assert_close(out, torch.stack(wanted))


def test_tokens_of_prompts_too(spared: None) -> None:
    inputs, a, low = torch.ones(5, 8), torch.ones(1, 1, 4, 8), torch.ones(5, 4)
    starts, lengths, indices = torch.tensor([0, 2]), torch.tensor([2, 3]), torch.tensor([-1, 0])
    lora_ops.sgmv_shrink(inputs, a, low, starts, lengths, indices, 2, 3, 5, 1.0)
    assert low.tolist() == [[0.0] * 4] * 2 + [[8.0] * 4] * 3
