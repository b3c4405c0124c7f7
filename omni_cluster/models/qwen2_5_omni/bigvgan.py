"""BigVGAN for many mel spectrograms of different lengths at once: transformers' numbers, in one pass.

The reference computes one sequence, or several of one length, because a sequence's end matters to it: convolutions see
zeros beyond the end, and the anti-aliased activations see the last sample repeated. Here every activation does both
at each row's own end: it repeats the row's own ends and writes zeros into its padding. As each convolution reads an
activation's output, and each upsampling the mean of its stage, also zero in the padding, rows never see one another.

Tensors are `[B, T, C]`, time-major, which is `channels_last` to cuDNN. A convolution's bias is left to the activation
after it, an upsampling is an ordinary convolution that makes all of a frame's samples as channels, and a dilated
convolution is an ordinary one along the columns of an image of rows as long as the dilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAMPBlock,
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
    kaiser_sinc_filter1d,
)

from omni_cluster.types.errors import ConfigError

BLOCKS_A_STAGE = 3
FOLD = 8
"""Samples that the last convolution makes at once, as channels: cuDNN is slow at one channel."""
HALF_FILTER: tuple[float, ...] = tuple(kaiser_sinc_filter1d(0.25, 0.3, 12).flatten()[:6].tolist())
"""The first six taps of the symmetric filter of every activation, up and down."""
LEAST_DECIBELS = -115
REFERENCE_DECIBELS = 20
NO_DIVISION_BY_ZERO = 1e-9

Branch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Snake:
    """x + gain sin^2(pi frequency x), where x is the input plus the bias: float32 `[C]` each."""

    bias: torch.Tensor
    frequency: torch.Tensor
    gain: torch.Tensor


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution without its bias that keeps the length.

    weight: `[out, in, 1, kernel]`, or, as cuDNN's own dilation is slow, `[out, in, kernel, 1]` of a dilated one.
    """

    weight: torch.Tensor
    dilation: int = 1

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, T, in]` -> `[B, T, out]`."""
        padding = [size // 2 for size in self.weight.shape[2:]]
        made = F.conv2d(self._image(hidden).permute(0, 3, 1, 2), self.weight, padding=padding)
        return made.permute(0, 2, 3, 1).flatten(1, 2)[:, : hidden.shape[1]].contiguous()

    def _image(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, 1, T, in]`, or `[B, T / dilation, dilation, in]` of T padded with the zeros a convolution sees there."""
        if self.dilation == 1:
            return hidden.unsqueeze(1)
        if missing := -hidden.shape[1] % self.dilation:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        return hidden.unflatten(1, (-1, self.dilation))


@dataclass(frozen=True, slots=True)
class Step:
    """A residual block's two activations, each with the convolution after it."""

    outer: Snake
    dilated: Convolution
    inner: Snake
    convolution: Convolution


@dataclass(frozen=True, slots=True)
class Stage:
    """An upsampling and the residual blocks whose mean is the stage's output; `bias` `[C]` is the blocks' sum."""

    upsampling: Convolution
    blocks: tuple[tuple[Step, ...], ...]
    bias: torch.Tensor


class Vocoder:
    """Mel spectrograms to waveforms: what `Qwen2_5OmniToken2WavBigVGANModel` makes of each row alone.

    Shapes depend on the input's shape only and nothing waits for the device, so a call can be captured in a CUDA
    graph once one of its shape has run, which compiles the kernels. The dtype, float32, float16 or bfloat16, is that
    of weights and of tensors in memory. In float32, cuDNN's TF32 setting decides what the convolutions round.

    Raises `ConfigError` for a model of another build than the hub's.
    """

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel, device: torch.device, dtype: torch.dtype) -> None:
        _check(model)
        loader = _Loader(device, dtype)
        self._dtype = dtype
        self._before = loader.convolution(model.conv_pre)
        self._before_bias = loader.constant(model.conv_pre.bias)
        self._stages = tuple(loader.stages(model))
        self._last_snake = loader.snake(model.activation_post, torch.zeros_like(model.activation_post.act.alpha))
        self._after = loader.folded(model.conv_post)
        rates = [math.prod(model.config.upsample_rates[:i]) for i in range(len(self._stages) + 1)]
        self._rates = torch.tensor(rates, dtype=torch.int32, device=device)[:, None]

    @torch.inference_mode()
    def __call__(self, mels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Waveforms float32 `[B, 240 n]` in [-1, 1] of mels `[B, n, 80]`.

        lengths: int32 `[B]` on the mels' device, at most n. Samples from 240 times a row's length on mean nothing.
        """
        ends = self._rates * lengths
        within = _within(mels, ends[0])
        hidden = self._before(torch.where(within, _loudness(mels.float()), 0).to(self._dtype))
        hidden = torch.where(within, hidden + self._before_bias, 0).to(self._dtype)
        for stage, stage_ends in zip(self._stages, ends[1:], strict=True):
            hidden = self._run(stage, hidden, stage_ends)
        hidden = activate(hidden, self._last_snake, ends[-1])
        folded = hidden.reshape(len(ends[0]), -1, FOLD * hidden.shape[2])
        return self._after(folded).flatten(1).float().clamp(-1, 1)

    def _run(self, stage: Stage, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = stage.upsampling(hidden).reshape(len(ends), -1, len(stage.bias))
        branches = [_run_block(block, hidden, ends) for block in stage.blocks]
        return mean_of_blocks(branches, stage.bias, ends)


def activate(hidden: torch.Tensor, snake: Snake, ends: torch.Tensor) -> torch.Tensor:
    """The anti-aliased activation of `hidden + bias`, `[B, T, C]`, each row ending at its own of `ends` int32 `[B]`.

    Zero from there on, whatever `hidden` holds there. Arithmetic is float32.
    """
    if hidden.is_cuda:
        from omni_cluster.models.qwen2_5_omni import bigvgan_kernels

        return bigvgan_kernels.activate(hidden, snake, ends)
    return _activate(hidden.float() + snake.bias, snake, ends).to(hidden.dtype)


def add_and_activate(
    hidden: torch.Tensor, residual: torch.Tensor, snake: Snake, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of `hidden + residual + bias`, and that sum, which means nothing in the padding."""
    if hidden.is_cuda:
        from omni_cluster.models.qwen2_5_omni import bigvgan_kernels

        return bigvgan_kernels.add_and_activate(hidden, residual, snake, ends)
    total = hidden.float() + residual.float() + snake.bias
    return _activate(total, snake, ends).to(hidden.dtype), total.to(hidden.dtype)


def mean_of_blocks(branches: list[Branch], bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sum of all tensors of the branches and the bias, over the branches' number, and zero in the padding."""
    first = branches[0][0]
    if first.is_cuda:
        from omni_cluster.models.qwen2_5_omni import bigvgan_kernels

        return bigvgan_kernels.mean_of_blocks(branches, bias, ends)
    total = sum((part.float() for branch in branches for part in branch), bias)
    return torch.where(_within(first, ends), total / len(branches), 0.0).to(first.dtype)


def _run_block(block: Sequence[Step], hidden: torch.Tensor, ends: torch.Tensor) -> Branch:
    """What a residual block adds up to: the sum before its last convolution, and that convolution's output."""
    total, made = hidden, _run_step(block[0], activate(hidden, block[0].outer, ends), ends)
    for step in block[1:]:
        activated, total = add_and_activate(made, total, step.outer, ends)
        made = _run_step(step, activated, ends)
    return total, made


def _run_step(step: Step, activated: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return step.convolution(activate(step.dilated(activated), step.inner, ends))


def _activate(x: torch.Tensor, snake: Snake, ends: torch.Tensor) -> torch.Tensor:
    """The kernel's mathematics on float32 `[B, T, C]`: up by 2, snake, down by 2, ends repeated at both rates."""
    times = x.shape[1]
    missing = -times % WINDOW
    doubled = _filtered(_UP, _repeat_ends(x, ends, 3, 3 + missing), WINDOW)[:, : 2 * times]
    bent = torch.sin_(torch.pi * snake.frequency * doubled).square_()
    doubled = torch.addcmul(doubled, snake.gain, bent)
    halved = _filtered(_DOWN, _repeat_ends(doubled, 2 * ends, 5, 5 + 2 * missing), 2 * WINDOW)[:, :times]
    return torch.where(_within(x, ends), halved, 0.0)


def _band(rows: Sequence[Sequence[float]], moves: int, step: int) -> torch.Tensor:
    """Float32 `[moves * len(rows), ...]`: the rows below each other, `moves` times, each time `step` to the right."""
    width = max(len(row) for row in rows)
    band = torch.zeros(moves, len(rows), (moves - 1) * step + width)
    for move in range(moves):
        for row, weights in enumerate(rows):
            band[move, row, move * step : move * step + len(weights)] = torch.tensor(weights)
    return band.flatten(0, 1)


WINDOW = 16
"""Times that one product of the host's filters makes; taps are added one after the other four times as slowly."""
FEW_CHANNELS = 8
"""Up to so many, a product for each window is slow: for one channel 20 times as slow as one product of all windows,
which copies them by channel, and is the slower one from some 16 on. A model of the hub's size has 24 and more."""
_TAPS = (*HALF_FILTER, *reversed(HALF_FILTER))
_UP = 2 * _band([_TAPS[0::2], (0.0, *_TAPS[1::2])], WINDOW, 1)
_DOWN = _band([_TAPS], WINDOW, 2)


def _filtered(band: torch.Tensor, x: torch.Tensor, step: int) -> torch.Tensor:
    """The band's product with each of the n windows of `x`: `[B, (n - 1) * step + width, C]` -> `[B, n * rows, C]`."""
    if x.shape[2] <= FEW_CHANNELS:
        by_channel = x.transpose(1, 2).unfold(2, band.shape[1], step)
        return torch.matmul(by_channel, band.T).flatten(2).transpose(1, 2).contiguous()
    windows = x.unfold(1, band.shape[1], step).transpose(2, 3)
    return torch.matmul(band, windows).flatten(1, 2)


def _repeat_ends(x: torch.Tensor, ends: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """`[B, before + T + after, C]`: each row with its first and its last sample repeated."""
    batch, times, channels = x.shape
    repeated = x.new_empty(batch, before + times + after, channels)
    repeated[:, :before] = x[:, :1]
    repeated[:, before : before + times] = x
    for row, end in enumerate(ends.tolist()):
        repeated[row, before + end :] = x[row, max(end - 1, 0)]
    return repeated


def _within(like: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Bool `[B, T, 1]`: which times of each row come before its end."""
    return (torch.arange(like.shape[1], device=like.device) < ends[:, None])[:, :, None]


def _loudness(mels: torch.Tensor) -> torch.Tensor:
    """Log-amplitude mels as decibels from the least to the reference, scaled to [-1, 1]."""
    least = math.exp(LEAST_DECIBELS / 20 * math.log(10))
    decibels = 20 * torch.log10(torch.exp(mels).clamp(min=least)) - REFERENCE_DECIBELS
    return (2 * ((decibels - LEAST_DECIBELS) / -LEAST_DECIBELS) - 1).clamp(-1, 1)


# ------------------------------------------------------------ from the module


def _check(model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
    config = model.config
    if len(config.resblock_kernel_sizes) != BLOCKS_A_STAGE:
        raise ConfigError(
            f"the BigVGAN has {len(config.resblock_kernel_sizes)} residual blocks a stage "
            f"(resblock_kernel_sizes), but only {BLOCKS_A_STAGE} can be run"
        )
    for kernel, rate in zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True):
        if (kernel - rate) % 2 or kernel > 3 * rate:
            raise ConfigError(
                f"the BigVGAN upsamples by {rate} with a kernel of {kernel} (upsample_kernel_sizes), but the kernel "
                "must exceed the rate by an even number and be at most three times the rate"
            )
    samples = math.prod(config.upsample_rates)
    if samples % FOLD:
        raise ConfigError(
            f"the BigVGAN makes {samples} samples of a frame (the product of upsample_rates), "
            f"but only multiples of {FOLD} can be run"
        )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Copies the module's parts: weights in the dtype, biases and activations in float32."""

    device: torch.device
    dtype: torch.dtype

    def stages(self, model: Qwen2_5OmniToken2WavBigVGANModel) -> Iterator[Stage]:
        for i, (upsampling,) in enumerate(model.ups):
            blocks = model.resblocks[i * BLOCKS_A_STAGE : (i + 1) * BLOCKS_A_STAGE]
            yield Stage(
                self.upsampling(upsampling),
                tuple(self.block(block, upsampling.bias) for block in blocks),
                self.constant(sum(block.convs2[-1].bias for block in blocks)),
            )

    def block(self, block: Qwen2_5OmniAMPBlock, input_bias: torch.Tensor) -> tuple[Step, ...]:
        """`input_bias` is what the block's input still lacks, and so does the first sum made of it."""
        first, *others = (convolution.bias for convolution in block.convs2)
        outer_biases = [input_bias, input_bias + first, *others[:-1]]
        return tuple(
            Step(self.snake(outer, outer_bias), self.convolution(dilated), self.snake(inner, dilated.bias),
                 self.convolution(convolution))
            for outer, outer_bias, dilated, inner, convolution in zip(
                block.activations[::2], outer_biases, block.convs1, block.activations[1::2], block.convs2, strict=True
            )
        )  # fmt: skip

    def snake(self, activation: Qwen2_5OmniAntiAliasedActivation1d, bias: torch.Tensor) -> Snake:
        frequency = activation.act.alpha.double().exp() / torch.pi
        gain = 1 / (activation.act.beta.float().exp() + NO_DIVISION_BY_ZERO)
        return Snake(self.constant(bias), self.constant(frequency), self.constant(gain))

    def convolution(self, module: nn.Conv1d) -> Convolution:
        dilation = int(module.dilation[0])
        return Convolution(self.weight(module.weight, 2 if dilation == 1 else 3), dilation)

    def folded(self, module: nn.Conv1d) -> Convolution:
        """`[B, T / FOLD, FOLD in]` -> `[B, T / FOLD, FOLD out]`: a kernel over one fold and its two neighbours."""
        taps, start = module.weight, FOLD - int(module.padding[0])
        beyond = 3 * FOLD - taps.shape[2] - start
        kernel = torch.cat([F.pad(taps, (start + time, beyond - time)) for time in range(FOLD)])
        return Convolution(self.weight(kernel.unflatten(2, (3, FOLD)).permute(0, 3, 1, 2).flatten(1, 2)))

    def upsampling(self, module: nn.ConvTranspose1d) -> Convolution:
        """Its taps by the sample of the frame that they make: a kernel over the frame and its two neighbours."""
        rate, padding, taps = int(module.stride[0]), int(module.padding[0]), module.weight.permute(1, 0, 2)
        kernel = taps.new_zeros(rate, *taps.shape[:2], 3)
        for sample in range(rate):
            for neighbour in (-1, 0, 1):
                tap = sample + padding - neighbour * rate
                if 0 <= tap < taps.shape[2]:
                    kernel[sample, :, :, neighbour + 1] = taps[:, :, tap]
        return Convolution(self.weight(kernel.flatten(0, 1)))

    def weight(self, weight: torch.Tensor, new_axis: int = 2) -> torch.Tensor:
        image = weight.detach().to(self.device, self.dtype).unsqueeze(new_axis)
        return image.to(memory_format=torch.channels_last)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().to(self.device, torch.float32, copy=True)
