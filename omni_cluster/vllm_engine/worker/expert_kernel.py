"""vLLM's Triton kernel of a layer's experts, compiled once for each of its tilings."""

from __future__ import annotations

import triton
from vllm.model_executor.layers.fused_moe import fused_moe

COUNTS = ("EM", "num_valid_tokens")
"""Its parameters that follow the number of tokens in a step."""


def compile_for_any_count() -> None:
    """Has Triton take those numbers as they come, in this process.

    It compiles a kernel of its own for multiples of 16. All steps that are captured or profiled at a start have such
    numbers, so the first step with an odd number of tokens waited for the compiler, and all requests with it: 1.7 s on
    the host of an H200, and again for each tiling. Only comparisons read the numbers: no load is slower.
    """
    stock = fused_moe.fused_moe_kernel
    fused_moe.fused_moe_kernel = triton.jit(stock.fn, do_not_specialize_on_alignment=COUNTS)
