"""`python -m tests.kernels.interpreted_float8`: the kernels of float8, as Triton interprets them, beside plain PyTorch.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints how far values and
scales of rows are from those of plain PyTorch, and the scales of what GELU makes of them.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from omni_cluster.kernels import float8, float8_kernels
from omni_cluster.kernels.float8 import VALUES, Float8Rows

COUNT, WIDTH = 6, 48


def exact_rows() -> torch.Tensor:
    """Each the multiple by a power of two of values that float8 has, the largest among them; the last of zeros."""
    drawn = torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(0)).to(VALUES).float()
    drawn[:, 7] = 448.0
    drawn[-1] = 0.0
    return drawn * 2.0 ** torch.arange(-3, COUNT - 3)[:, None]


def interpreted(rows: torch.Tensor, gelu: bool) -> Float8Rows:
    made = Float8Rows.empty_like(rows)
    float8_kernels.quantize(rows, made.values, made.scales, gelu)
    return made


def furthest(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((made.float() - wanted.float()).abs() / wanted.float().abs().clamp(min=1e-9)).max())


def differences() -> list[float]:
    rows = exact_rows()
    made, wanted = interpreted(rows, gelu=False), float8.quantized(rows)
    activated, wanted_activated = interpreted(rows, gelu=True), float8.quantized(rows, gelu=True)
    return [
        furthest(made.values, wanted.values),
        furthest(made.scales, wanted.scales),
        furthest(activated.scales, wanted_activated.scales),
    ]


if __name__ == "__main__":
    print(*differences())
