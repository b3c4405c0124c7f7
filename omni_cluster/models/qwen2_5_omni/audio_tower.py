"""Embeddings of sounds: transformers' audio tower, which asks the card for nothing on the way.

transformers attends window by window, 2 s of sound each, and reads their lengths from the card three times in each of
the tower's layers. The card has nothing to do meanwhile. Here the lengths stay on the CPU, where vLLM has them, windows
of one length that follow each other are attended together, and the layers for sounds of usual length are a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as stock

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least

GRAPH_POSITIONS = (128, 256, 512, 1024, 2048)
"""Of all sounds of a step together, which the layers are captured for. A second of sound has 50."""
LEAST_POSITIONS = 4
"""Of a sound, on average, which the captured layers have room for."""
FLASH_DTYPES, FLASH_CAPABILITY = (torch.float16, torch.bfloat16), (8, 0)
"""What attention over windows of many lengths takes, and the least capability of a card that has it."""


class WindowAttention(nn.Module):
    """The attention of one of the tower's layers, with the projections of transformers'."""

    def __init__(self, attention: stock.Qwen2_5OmniAudioAttention, most_positions: int) -> None:
        """`most_positions`: of a window."""
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.out_proj = attention.out_proj
        self._num_heads, self._most_positions = attention.num_heads, most_positions

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **_: object) -> torch.Tensor:
        """Of all windows, `[n, width]` -> the same shape.

        `cu_seqlens`: where each begins, and the end, int32; on the CPU, or, to be captured, on the card.
        """
        query, key, value = (
            projection(hidden_states).unflatten(1, (self._num_heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cu_seqlens.is_cuda:
            most = self._most_positions
            attended = cast(torch.Tensor, varlen_attn(query, key, value, cu_seqlens, cu_seqlens, most, most))
        else:
            attended = _attended(query, key, value, cu_seqlens)
        return self.out_proj(attended.flatten(1))


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """`[n, heads, width]` each -> the same shape. Windows of one length that follow each other go together."""
    attended, end = [], 0
    for length, same in groupby(begins.diff().tolist()):
        begin, end = end, end + length * len(list(same))
        windows = [each[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for each in (query, key, value)]
        attended.append(scaled_dot_product_attention(*windows).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the captured layers read: `hidden` `[positions, width]`; `begins`: of windows, int32, and the end."""

    hidden: torch.Tensor
    begins: torch.Tensor

    def put(self, hidden: torch.Tensor, begins: list[int], window: int) -> bool:
        """False for windows that find no room. Positions behind the last are windows of zeros."""
        used, size = begins[-1], len(self.hidden)
        begins = [*begins, *range(used + window, size, window)]
        missing = len(self.begins) - len(begins)
        if missing < 1:
            return False
        self.hidden[:used] = hidden
        self.hidden[used:] = 0
        self.begins.copy_(torch.tensor(begins + missing * [size], dtype=torch.int32), non_blocking=True)
        return True


class Hearing:
    """The tower at work."""

    def __init__(self, tower: stock.Qwen2_5OmniAudioEncoder) -> None:
        """The tower's parameters keep their names."""
        self._tower = tower
        self._graphs: dict[int, CapturedWork[LayerInputs, torch.Tensor]] = {}
        for layer in tower.layers:
            layer.self_attn = WindowAttention(layer.self_attn, tower.n_window)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the layers, once their weights are loaded; where they are on a card, in half precision."""
        weight = self._tower.proj.weight
        if not weight.is_cuda or weight.dtype not in FLASH_DTYPES:
            return
        if torch.cuda.get_device_capability(weight.device) < FLASH_CAPABILITY:
            return
        pool = GraphPool()
        for size in sorted(GRAPH_POSITIONS, reverse=True):
            inputs = LayerInputs(
                torch.zeros(size, weight.shape[1], dtype=weight.dtype, device=weight.device),
                torch.zeros(size // LEAST_POSITIONS + 1, dtype=torch.int32, device=weight.device),
            )
            inputs.put(inputs.hidden[:1], [0, 1], self._tower.n_window)
            work = functools.partial(self._through_layers, inputs.hidden, inputs.begins)
            self._graphs[size] = CapturedWork(inputs, work, pool)

    def __call__(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Embeddings `[tokens, H]` of each sound.

        `features`: mel frames of all, `[mel bins, frames]`; `lengths`: the frames of each, int64 on the CPU.
        """
        tower, device = self._tower, features.device
        windows, frames = stock.chunk_and_pad_features(features.to(tower.dtype), lengths, tower.n_window)
        positions = stock.get_valid_indices(frames).to(device, non_blocking=True)
        hidden = self._convolved(windows, frames.to(device, non_blocking=True)).flatten(0, 1)[positions]
        hidden = self._attended(hidden, stock.get_audio_cu_seqlens(frames))
        pairs = stock.get_pool_indices(lengths).to(device, non_blocking=True)
        pooled = (hidden[pairs] + hidden[pairs + 1]) / 2
        made = tower.proj(tower.ln_post(pooled))
        return made.split([sound_tokens(frames) for frames in lengths.tolist()])

    def _convolved(self, windows: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Windows `[n, mel bins, frames]`, of which each has so many -> `[n, positions, width]`."""
        tower = self._tower
        is_frame = torch.arange(windows.shape[2], device=windows.device) < frames[:, None]
        hidden = gelu(tower.conv1(windows)) * is_frame[:, None].long()
        hidden = gelu(tower.conv2(hidden)).transpose(1, 2)
        return hidden + tower.positional_embedding.positional_embedding[: hidden.shape[1]].to(hidden.dtype)

    def _attended(self, hidden: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Positions `[n, width]` of all windows, which begin there -> the same shape."""
        size = size_at_least(len(hidden), self._graphs)
        if size is not None and self._graphs[size].inputs.put(hidden, begins.tolist(), self._tower.n_window):
            return self._graphs[size].replay()[: len(hidden)]
        return self._through_layers(hidden, begins)

    def _through_layers(self, hidden: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        for layer in self._tower.layers:
            (hidden,) = layer(hidden, cu_seqlens=begins)
        return hidden


def sound_tokens(mel_frames: int) -> int:
    """What the tower makes of so many frames: a convolution takes every second one, and a mean two of those."""
    return ((mel_frames - 1) // 2 + 1 - 2) // 2 + 1
