"""Embeddings of sounds: transformers' audio tower, which asks the card for nothing on the way.

transformers attends window by window, 2 s of sound each, and reads their lengths from the card three times in each of
the tower's layers. The card has nothing to do meanwhile. Here the lengths stay on the CPU, where vLLM has them, and
windows of one length that follow each other are attended together.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as stock


class WindowAttention(nn.Module):
    """The attention of one of the tower's layers, with the projections of transformers'."""

    def __init__(self, attention: stock.Qwen2_5OmniAudioAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.out_proj = attention.out_proj
        self._num_heads, self._scaling = attention.num_heads, attention.scaling

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **_: object) -> torch.Tensor:
        """`[n, width]` of all windows, and where each begins, int32 `[windows + 1]` on the CPU -> `[n, width]`."""
        projected = [p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj)]
        attended, end = [], 0
        for length, same in groupby(cu_seqlens.diff().tolist()):
            begin, end = end, end + length * len(list(same))
            attended.append(self._attended([each[begin:end] for each in projected], length))
        return self.out_proj(torch.cat(attended))

    def _attended(self, projected: list[torch.Tensor], length: int) -> torch.Tensor:
        """Queries, keys and values of windows of one length, `[windows * length, width]` -> the same shape."""
        heads = [each.unflatten(0, (-1, length)).unflatten(2, (self._num_heads, -1)) for each in projected]
        query, key, value = (each.transpose(1, 2) for each in heads)
        attended = scaled_dot_product_attention(query, key, value, scale=self._scaling)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def attend_windows_together(tower: stock.Qwen2_5OmniAudioEncoder) -> None:
    """Its attention becomes `WindowAttention`; its parameters keep their names."""
    for layer in tower.layers:
        layer.self_attn = WindowAttention(layer.self_attn)


def heard(
    tower: stock.Qwen2_5OmniAudioEncoder, features: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Embeddings `[tokens, H]` of each sound.

    `features`: mel frames of all, `[mel bins, frames]`; `lengths`: the frames of each, int64 on the CPU.
    """
    features = features.to(tower.dtype)
    padded, window_lengths = stock.chunk_and_pad_features(features, lengths, tower.n_window)
    device = features.device
    made = tower(
        features,
        feature_lens=lengths,
        padded_feature=padded,
        chunk_lengths=window_lengths.to(device, non_blocking=True),
        valid_indices=stock.get_valid_indices(window_lengths).to(device, non_blocking=True),
        pool_indices=stock.get_pool_indices(lengths).to(device, non_blocking=True),
        cu_seqlens=stock.get_audio_cu_seqlens(window_lengths),
    )
    return made.last_hidden_state.split([sound_tokens(frames) for frames in lengths.tolist()])


def sound_tokens(mel_frames: int) -> int:
    """What the tower makes of so many frames: a convolution takes every second one, and a mean two of those."""
    return ((mel_frames - 1) // 2 + 1 - 2) // 2 + 1
