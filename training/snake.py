"""The vocoder's activation on a card: its snake in one kernel there and one back, instead of some thirty passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import conv_transpose1d, pad
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAntiAliasedActivation1d

BLOCK = 2048


def use_kernels(vocoder: torch.nn.Module) -> None:
    """Has all its activations computed so; names and values of its weights stay what they are."""
    for module in vocoder.modules():
        if isinstance(module, Qwen2_5OmniAntiAliasedActivation1d):
            vars(module)["forward"] = partial(activated, module)


def activated(activation: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What its `forward` gives for `[B, C, T]`."""
    up, act, channels = activation.upsample, activation.act, hidden.shape[1]
    beside = up.kernel_size // 4  # as far as the filter reaches
    filters = (up.ratio * up.filter).expand(channels, -1, -1)
    hidden = conv_transpose1d(
        pad(hidden, (beside, beside), mode="replicate"), filters,
        stride=up.stride, padding=up.kernel_size - 1, groups=channels,
    )  # fmt: skip
    gain = 1 / (act.beta.exp() + act.no_div_by_zero)
    made: torch.Tensor = activation.downsample(Snake.apply(hidden, act.alpha.exp(), gain))  # type: ignore[no-untyped-call]
    return made


class Snake(torch.autograd.Function):
    """x + gain sin^2(frequency x), of `[B, C, T]` and twice `[C]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, frequency: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, frequency, gain)
        made = torch.empty_like(x)
        _forward[_grid(x)](x, frequency, gain, made, x.shape[1], x.shape[2], BLOCK)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, frequency, gain = ctx.saved_tensors
        of_x, grid = torch.empty_like(x), _grid(x)
        sums = x.new_empty(2, *x.shape[:2], grid[1])  # each program's own, which are the same in each run
        _backward[grid](
            x, frequency, gain, gradients[0].contiguous(), of_x, sums[0], sums[1], x.shape[1], x.shape[2], BLOCK
        )
        of_frequency, of_gain = sums.sum((1, 3))
        return of_x, of_frequency, of_gain


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], BLOCK)


@triton.jit
def _forward(
    x_ptr: tl.tensor, frequency_ptr: tl.tensor, gain_ptr: tl.tensor, made_ptr: tl.tensor, channels: tl.tensor,
    times: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    frequency, gain = tl.load(frequency_ptr + row % channels), tl.load(gain_ptr + row % channels)
    time = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * times + time
    x = tl.load(x_ptr + at, mask=time < times, other=0.0)
    sine = tl.sin(frequency * x)
    tl.store(made_ptr + at, x + gain * sine * sine, mask=time < times)


@triton.jit
def _backward(
    x_ptr: tl.tensor, frequency_ptr: tl.tensor, gain_ptr: tl.tensor, given_ptr: tl.tensor, of_x_ptr: tl.tensor,
    of_frequency_ptr: tl.tensor, of_gain_ptr: tl.tensor, channels: tl.tensor, times: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    frequency, gain = tl.load(frequency_ptr + row % channels), tl.load(gain_ptr + row % channels)
    time = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * times + time
    x = tl.load(x_ptr + at, mask=time < times, other=0.0)
    given = tl.load(given_ptr + at, mask=time < times, other=0.0)
    sine = tl.sin(frequency * x)
    slope = gain * 2 * sine * tl.cos(frequency * x)
    tl.store(of_x_ptr + at, given * (1 + frequency * slope), mask=time < times)
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_frequency_ptr + part, tl.sum(given * slope * x))
    tl.store(of_gain_ptr + part, tl.sum(given * sine * sine))
