"""Inputs of the decoder's kernels, and what they should give."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from omni_cluster.kernels.decoder_kernels import Weight

EPS = 1e-6


SCALES = [0, 1, 2]
"""Of a weight: none, one, and one of each feature."""


def stored(weight: torch.Tensor, scales: int) -> Weight:
    """In e4m3 with so many scales, or as it is with none."""
    if scales == 0:
        return Weight(weight)
    largest = weight.float().abs().amax(1, keepdim=True) if scales > 1 else weight.float().abs().amax().reshape(1)
    return Weight((weight.float() / (largest / 448)).to(torch.float8_e4m3fn), largest / 448)


def plain(weight: Weight) -> torch.Tensor:
    values = weight.values.float()
    return values if weight.scales is None else values * weight.scales


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x.float(), plain(weight), None if bias is None else bias.float()).to(x.dtype)


def silu_and_multiply(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate.float()).to(both.dtype) * up
