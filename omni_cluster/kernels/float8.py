"""Products in float8: rows of e4m3 with a scale each, and weights with a scale for each of their features.

A row is scaled so that its largest value is the largest of e4m3, 448. With 3 bits behind the leading one, a value is
rounded by 1/16 of itself at most. Scales are taken from each row as it comes: nothing is calibrated, and a row is
rounded the same beside any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omni_cluster.kernels import float8_kernels
from omni_cluster.kernels.float8_kernels import LARGEST, SMALLEST
from omni_cluster.types.errors import ConfigError

VALUES = torch.float8_e4m3fn
LEAST_CAPABILITY = (8, 9)
"""Of a card that multiplies float8."""


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """`values` `[rows, width]` of e4m3, each row times its scale: float32 `[rows, 1]`."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty_like(cls, rows: torch.Tensor) -> Float8Rows:
        return cls(torch.empty_like(rows, dtype=VALUES), rows.new_empty(rows.shape[0], 1, dtype=torch.float32))


def check_device(device: torch.device) -> None:
    """Raises ConfigError for a card that has no products in float8. A CPU has them."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else LEAST_CAPABILITY
    if capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise ConfigError(
            f"dtype is float8 and the card has compute capability {has}: use bfloat16, or a card of {needs}"
        )


def quantized(rows: torch.Tensor, gelu: bool = False) -> Float8Rows:
    """Rows `[rows, width]` of any float dtype, or what GELU by tanh makes of them, in float8."""
    if rows.is_cuda:
        made = Float8Rows.empty_like(rows)
        float8_kernels.quantize(rows, made.values, made.scales, gelu)
        return made
    rows = rows.float()
    if gelu:
        rows = F.gelu(rows, approximate="tanh")
    scales = rows.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return Float8Rows((rows / scales).to(VALUES), scales)


def in_float8(rows: torch.Tensor | Float8Rows) -> Float8Rows:
    return rows if isinstance(rows, Float8Rows) else quantized(rows)


def product(rows: Float8Rows, weight: Float8Rows, bias: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[rows, features]`: `rows` times `weight` `[features, width]`, plus `bias` bfloat16 `[features]`.

    On CUDA from `LEAST_CAPABILITY` on; both widths are multiples of 16. Sums have some 14 bits there, far more than
    what is summed.
    """
    made: torch.Tensor = torch._scaled_mm(
        rows.values,
        weight.values.T,
        scale_a=rows.scales,
        scale_b=weight.scales.T,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return made
