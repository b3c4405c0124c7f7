"""vLLM's products of LoRA adapters on a CPU, for batches in which some requests have none."""

from __future__ import annotations

from typing import Any

import torch


def spare_the_base_model() -> None:
    """Has vLLM leave tokens without an adapter as they are, in this process; its kernels for cards do.

    vLLM numbers such a token -1, and takes that for the last adapter of the batch: vllm-project/vllm#48421.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    stock = lora_ops.bgmv_shrink
    if stock.__module__ == __name__:
        return

    def bgmv_shrink(inputs: Any, weights: Any, output: torch.Tensor, indices: torch.Tensor, *scaling: Any) -> None:
        """`output` `[tokens, rank]` is what the adapters' other halves are multiplied by: nothing comes of zeros."""
        stock(inputs, weights, output, indices, *scaling)
        output[: len(indices)].masked_fill_((indices < 0).unsqueeze(-1), 0)

    # Of a step of one token a request, and of others.
    punica_cpu.bgmv_shrink = lora_ops.bgmv_shrink = bgmv_shrink
