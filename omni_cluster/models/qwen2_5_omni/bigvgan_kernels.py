"""BigVGAN's anti-aliased activation and its mean of residual blocks on the GPU: one pass over memory each.

A lane is one channel of one tile of time. It walks forward with the filters' windows in registers, so that the twelve
taps of either filter cost multiplications and no memory traffic, and so that arithmetic is float32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from omni_cluster.models.qwen2_5_omni.bigvgan import HALF_FILTER, Branch, Snake

LANES_FOR_A_FULL_GPU = 1 << 17
MEAN_ELEMENTS = 1024

F0, F1, F2, F3, F4, F5 = (tl.constexpr(tap) for tap in HALF_FILTER)
# Adding it to a float32 of magnitude below 2^22 leaves the nearest integer in the low bits.
ROUNDING = tl.constexpr(12582912.0)
# The odd polynomial of least error for sin(pi r) on [-1/2, 1/2]: 3e-9.
SINE_1 = tl.constexpr(3.141592502593994)
SINE_3 = tl.constexpr(-5.1677069664001465)
SINE_5 = tl.constexpr(2.5500314235687256)
SINE_7 = tl.constexpr(-0.5980451703071594)
SINE_9 = tl.constexpr(0.0772201269865036)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Output times of a lane, a multiple of four; lanes and warps of a program."""

    times: int
    lanes: int
    warps: int


def choose_tiling(elements: int) -> Tiling:
    """Long tiles waste least at their edges, short ones fill the GPU when there is little to do."""
    for times in (64, 32, 16):
        if elements // times >= LANES_FOR_A_FULL_GPU:
            return Tiling(times, 128, 4)
    return Tiling(8, 64, 2)


def activate(hidden: torch.Tensor, snake: Snake, ends: torch.Tensor, tiling: Tiling | None = None) -> torch.Tensor:
    """`bigvgan.activate` for a contiguous CUDA tensor."""
    return _launch(hidden, hidden, hidden, snake, ends, tiling)


def add_and_activate(
    hidden: torch.Tensor, residual: torch.Tensor, snake: Snake, ends: torch.Tensor, tiling: Tiling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bigvgan.add_and_activate` for contiguous CUDA tensors; the sum's padding is left as it was in memory."""
    total = torch.empty_like(hidden)
    return _launch(hidden, residual, total, snake, ends, tiling), total


def _launch(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    total: torch.Tensor,
    snake: Snake,
    ends: torch.Tensor,
    tiling: Tiling | None,
) -> torch.Tensor:
    batch, times, channels = hidden.shape
    tiling = tiling or choose_tiling(hidden.numel())
    lanes = triton.cdiv(times, tiling.times) * channels
    activated = torch.empty_like(hidden)
    _activate[(triton.cdiv(lanes, tiling.lanes), batch)](
        hidden, residual, total, activated, snake.bias, snake.frequency, snake.gain, ends, times, channels, lanes,
        residual is not hidden, tiling.times, tiling.lanes, num_warps=tiling.warps,
    )  # fmt: skip
    return activated


def mean_of_blocks(branches: list[Branch], bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`bigvgan.mean_of_blocks` for contiguous CUDA tensors."""
    (a, b), (c, d), (e, f) = branches
    batch, times, channels = a.shape
    mean = torch.empty_like(a)
    grid = (triton.cdiv(times * channels, MEAN_ELEMENTS), batch)
    _mean[grid](a, b, c, d, e, f, mean, bias, ends, times, channels, MEAN_ELEMENTS)
    return mean


@triton.jit
def _snake(x: tl.tensor, frequency: tl.tensor, gain: tl.tensor) -> tl.tensor:
    """x + gain sin^2(pi frequency x), which repeats when frequency x grows by 1."""
    turns = x * frequency
    r = turns - ((turns + ROUNDING) - ROUNDING)
    s = r * r
    sine = r * (SINE_1 + s * (SINE_3 + s * (SINE_5 + s * (SINE_7 + s * SINE_9))))
    return x + gain * (sine * sine)


@triton.jit
def _load(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, bias: tl.tensor, channels: tl.tensor, live: tl.tensor, time: tl.tensor,
    last: tl.tensor, ADD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The input at a time, repeated beyond both ends of the row."""
    at = tl.maximum(tl.minimum(time, last), 0) * channels
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) + bias
    if ADD:
        x += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    return x


@triton.jit
def _pair(
    x: tl.tensor, ahead: tl.tensor, frequency: tl.tensor, gain: tl.tensor, time: tl.tensor, last: tl.tensor,
    before: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Activated samples 2 time and 2 time + 1 of inputs time - 3 .. time + 3; `before` is the sample 2 time - 1."""
    even = F0 * x[0] + F2 * x[1] + F4 * x[2] + F5 * x[3] + F3 * x[4] + F1 * x[5]
    odd = F1 * x[1] + F3 * x[2] + F5 * x[3] + F4 * x[4] + F2 * x[5] + F0 * ahead
    beyond = time > last
    even = tl.where(beyond, before, _snake(2.0 * even, frequency, gain))
    odd = tl.where(beyond, before, _snake(2.0 * odd, frequency, gain))
    return even, odd


@triton.jit
def _push(window: tl.tensor, value: tl.tensor) -> tl.tensor:
    return window[1], window[2], window[3], window[4], window[5], value


@triton.jit
def _repeat_first(window: tl.tensor, first: tl.tensor, starts: tl.tensor) -> tl.tensor:
    """At a row's start, the first activated sample in place of those before it."""
    early = tl.where(starts, first, window[0]), tl.where(starts, first, window[1]), tl.where(starts, first, window[2])
    return early[0], early[1], early[2], window[3], window[4], window[5]


# Not specialized, so that six stages and any length share what was compiled.
@triton.jit(do_not_specialize=["ends_ptr", "times", "channels", "lanes"])
def _activate(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, total_ptr: tl.tensor, out_ptr: tl.tensor, bias_ptr: tl.tensor,
    frequency_ptr: tl.tensor, gain_ptr: tl.tensor, ends_ptr: tl.tensor, times: tl.tensor, channels: tl.tensor,
    lanes: tl.tensor, ADD: tl.constexpr, TIMES: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < lanes
    channel = lane % channels
    start = (lane // channels) * TIMES
    last = tl.load(ends_ptr + row) - 1
    bias = tl.load(bias_ptr + channel)
    frequency = tl.load(frequency_ptr + channel)
    gain = tl.load(gain_ptr + channel)
    at = row.to(tl.int64) * times * channels + channel
    x_ptr += at
    residual_ptr += at
    total_ptr += at
    out_ptr += at

    x = (
        _load(x_ptr, residual_ptr, bias, channels, live, start - 6, last, ADD),
        _load(x_ptr, residual_ptr, bias, channels, live, start - 5, last, ADD),
        _load(x_ptr, residual_ptr, bias, channels, live, start - 4, last, ADD),
        _load(x_ptr, residual_ptr, bias, channels, live, start - 3, last, ADD),
        _load(x_ptr, residual_ptr, bias, channels, live, start - 2, last, ADD),
        _load(x_ptr, residual_ptr, bias, channels, live, start - 1, last, ADD),
    )
    evens, odds = x, x  # six of each are activated before the first output
    for i in tl.static_range(6):
        ahead = _load(x_ptr, residual_ptr, bias, channels, live, start + i, last, ADD)
        even, odd = _pair(x, ahead, frequency, gain, start - 3 + i, last, odds[5])
        x, evens, odds = _push(x, ahead), _push(evens, even), _push(odds, odd)
    odds = _repeat_first(odds, evens[3], start == 0)
    evens = _repeat_first(evens, evens[3], start == 0)

    for step in range(0, TIMES, 4):
        time = start + step
        # Together and before any store, which no later load could be moved across.
        four = (
            _load(x_ptr, residual_ptr, bias, channels, live, time + 6, last, ADD),
            _load(x_ptr, residual_ptr, bias, channels, live, time + 7, last, ADD),
            _load(x_ptr, residual_ptr, bias, channels, live, time + 8, last, ADD),
            _load(x_ptr, residual_ptr, bias, channels, live, time + 9, last, ADD),
        )
        for i in tl.static_range(4):
            even, odd = _pair(x, four[i], frequency, gain, time + 3 + i, last, odds[5])
            y = F0 * odds[0] + F1 * evens[1] + F2 * odds[1] + F3 * evens[2] + F4 * odds[2] + F5 * evens[3]
            y += F5 * odds[3] + F4 * evens[4] + F3 * odds[4] + F2 * evens[5] + F1 * odds[5] + F0 * even
            y = tl.where(time + i <= last, y, 0.0)
            within = live & (time + i < times)
            tl.store(out_ptr + (time + i) * channels, y, mask=within)
            if ADD:
                tl.store(total_ptr + (time + i) * channels, x[0], mask=within)
            x, evens, odds = _push(x, four[i]), _push(evens, even), _push(odds, odd)


@triton.jit(do_not_specialize=["ends_ptr", "times"])
def _mean(
    a_ptr: tl.tensor, b_ptr: tl.tensor, c_ptr: tl.tensor, d_ptr: tl.tensor, e_ptr: tl.tensor, f_ptr: tl.tensor,
    mean_ptr: tl.tensor, bias_ptr: tl.tensor,
    ends_ptr: tl.tensor, times: tl.tensor, CHANNELS: tl.constexpr, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1)
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < times * CHANNELS
    within = mask & (at // CHANNELS < tl.load(ends_ptr + row))
    row_at = row.to(tl.int64) * times * CHANNELS
    total = tl.load(bias_ptr + at % CHANNELS)
    total += tl.load(a_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    total += tl.load(b_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    total += tl.load(c_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    total += tl.load(d_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    total += tl.load(e_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    total += tl.load(f_ptr + row_at + at, mask=within, other=0.0).to(tl.float32)
    tl.store(mean_ptr + row_at + at, tl.where(within, total / 3.0, 0.0), mask=mask)
