"""Rows of float8 on CUDA; the same arithmetic as the plain PyTorch in `float8.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0
"""Of e4m3."""
SMALLEST = 1e-12
"""A row of zeros has a scale too."""
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


@triton.jit
def store_quantized(row, x, values, scales, width, columns, there):
    """Stores one row `x` float32, which is zero where nothing is `there`, in float8, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), _SMALLEST) / _LARGEST
    tl.store(scales + row, scale)
    tl.store(values + row * width + columns, (x / scale).to(values.dtype.element_ty), there)


@triton.jit
def gelu_by_tanh(x):
    """x / (1 + exp(-2 * 0.79788 * (x + 0.044715 * x^3))), which is GELU by tanh."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _quantize(rows, values, scales, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    there = columns < width
    x = tl.load(rows + row * width + columns, there, 0.0).to(tl.float32)
    if GELU:
        x = gelu_by_tanh(x)
    store_quantized(row, x, values, scales, width, columns, there)


def quantize(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, gelu: bool) -> None:
    """`rows` `[rows, width]`, or what GELU makes of them, into `values` of the same shape and `scales` `[rows, 1]`."""
    count, width = rows.shape
    _quantize[(count,)](rows, values, scales, width, GELU=gelu, BLOCK=triton.next_power_of_2(width), num_warps=4)
