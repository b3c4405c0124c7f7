"""Codes to waveform by a causal network, piece by piece: the joined pieces are what one decode of all codes gives.

A transformer makes a row of each code, and transposed convolutions make samples of the rows. Each of these cuts as much
off the end as off the beginning, so that a sample may wait for the code behind its own, and L codes give
`samples_per_code * L - missing_samples`. What a stream keeps is bounded: keys and values of the codes that the
transformer's window reaches, and the last rows, which the convolutions see again before new ones. Their own tails would
spare these rows, some 65 us of arithmetic a piece at a card's bound, but take three more kernels for each of twenty
convolutions, and a state of each. That is by count; neither was measured on a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_cluster.models.checkpoint_files import load_tensors, read_config
from omni_cluster.models.qwen3_omni.code2wav import Reach
from omni_cluster.types.errors import PayloadError

PASS_CODES = 64
"""Codes of a stream in a pass at most: activations take some 3 MB a code in float32."""


def load_vocoder(folder: Path, device: torch.device, dtype: torch.dtype) -> Vocoder:
    """The code2wav of a checkpoint."""
    config = Qwen3OmniMoeCode2WavConfig(**read_config(folder)["code2wav_config"])
    model = Qwen3OmniMoeCode2Wav._from_config(config, attn_implementation="sdpa")
    model.load_state_dict(load_tensors(folder, "code2wav.", device))
    return Vocoder(model.to(device, dtype).eval())


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream keeps of the codes that it had, `count` of them.

    `keys`, `values` `[layers, heads, window - 1, head_dim]`: of the last codes, zero before the first one.
    `outputs` `[n, hidden]`: the transformer's last rows, at most those of the convolutions' context.
    """

    count: int
    keys: torch.Tensor
    values: torch.Tensor
    outputs: torch.Tensor


class VocoderStream:
    """The codes of one request, and how far its sound is."""

    def __init__(self, state: StreamState) -> None:
        self.state = state


class Vocoder:
    """Waveforms of streams, of any ages and of pieces of any lengths, in one pass."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        self._model = model
        self._config = config = model.config
        self.reach = Reach.of(config.upsampling_ratios, config.upsample_rates)

    @property
    def _weight(self) -> torch.Tensor:
        return self._model.code_embedding.weight

    def stream(self) -> VocoderStream:
        """One that has had no codes."""
        config = self._config
        kept = self._weight.new_zeros(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.sliding_window - 1,
            self._model.pre_transformer.layers[0].self_attn.head_dim,
        )
        return VocoderStream(StreamState(0, kept, kept, self._weight.new_zeros(0, config.hidden_size)))

    def check(self, codes: np.ndarray) -> None:
        """Raises PayloadError: on a device, an index behind a table's end is the end of all that runs there."""
        codebooks, largest = self._config.num_quantizers, self._config.codebook_size - 1
        if codes.ndim != 2 or codes.shape[1] != codebooks:
            raise PayloadError(f"Codes have the shape {list(codes.shape)}; they are [n, {codebooks}].")
        if not np.issubdtype(codes.dtype, np.integer):
            raise PayloadError(f"Codes are {codes.dtype}; they are integers.")
        wrong = codes[(codes < 0) | (codes > largest)]
        if len(wrong):
            raise PayloadError(f"Codes have {wrong[0]} among them; they are from 0 to {largest}.")

    @torch.inference_mode()
    def take(self, streams: Sequence[VocoderStream], codes: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """All samples `[-1, 1]` that each stream's next codes `[n, Q]` allow; nothing is held back.

        Raises PayloadError for invalid codes. When it raises, all streams are as they were before.
        """
        for each in codes:
            self.check(each)
        states = [stream.state for stream in streams]
        waves: list[list[torch.Tensor]] = [[] for _ in streams]
        for start in range(0, max(map(len, codes), default=0), PASS_CODES):
            places = [place for place, each in enumerate(codes) if len(each) > start]
            pieces = [codes[place][start : start + PASS_CODES] for place in places]
            made = self._pass([states[place] for place in places], pieces)
            for place, (wave, state) in zip(places, made, strict=True):
                waves[place].append(wave)
                states[place] = state
        for stream, state in zip(streams, states, strict=True):
            stream.state = state
        return [torch.cat([self._weight.new_zeros(0), *parts]) for parts in waves]

    def _pass(
        self, states: Sequence[StreamState], codes: Sequence[np.ndarray]
    ) -> Iterable[tuple[torch.Tensor, StreamState]]:
        kept = _Kept(states)
        rows = self._rows(states, codes, kept)
        windows = [
            torch.cat([state.outputs, own[: len(each)]]) for state, own, each in zip(states, rows, codes, strict=True)
        ]
        waves = self._waves(windows)
        for place, (state, each) in enumerate(zip(states, codes, strict=True)):
            keys, values = kept.after(place, len(each))
            outputs = windows[place][-self.reach.context :].clone()
            first, end = (self.reach.samples(count) for count in (len(state.outputs), len(windows[place])))
            yield waves[place][first:end].clone(), StreamState(state.count + len(each), keys, values, outputs)

    def _rows(self, states: Sequence[StreamState], codes: Sequence[np.ndarray], kept: _Kept) -> torch.Tensor:
        """The transformer's rows `[B, n, hidden]` of the longest piece's length; those behind a piece's end are any."""
        model, device = self._model, self._weight.device
        padded = pad_sequence([torch.as_tensor(each.T.astype(np.int64)).T for each in codes], batch_first=True)
        hidden = model.code_embedding(padded.to(device).transpose(1, 2) + model.code_offset).mean(1)
        counts = torch.tensor([state.count for state in states], device=device)[:, None]
        positions = counts + torch.arange(hidden.shape[1], device=device)
        mask = self._mask(counts, hidden.shape[1])
        rotation = model.pre_transformer.rotary_emb(hidden, positions)
        for layer in model.pre_transformer.layers:
            hidden = layer(hidden, mask, positions, kept, position_embeddings=rotation)
        return model.pre_transformer.norm(hidden)

    def _mask(self, counts: torch.Tensor, length: int) -> torch.Tensor:
        """Which of the kept codes and of its own piece a code sees, `[B, 1, n, window - 1 + n]`."""
        window = self._config.sliding_window
        seeing = torch.arange(length, device=counts.device)[:, None]
        seen = torch.arange(1 - window, length, device=counts.device)
        is_near = (seen <= seeing) & (seeing - seen < window)
        is_there = counts + seen >= 0
        return (is_near & is_there[:, None])[:, None]

    def _waves(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of rows `[n, hidden]` each; a wave is right as far as its own rows allow."""
        waves = [windows[0].new_empty(0)] * len(windows)
        for places in alike([len(window) for window in windows]):
            made = self._convolved(pad_sequence([windows[place] for place in places], batch_first=True))
            for place, wave in zip(places, made, strict=True):
                waves[place] = wave
        return waves

    def _convolved(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[B, n, hidden]` -> waves `[B, samples]`."""
        hidden = rows.transpose(1, 2)
        for blocks in self._model.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self._model.decoder:
            hidden = block(hidden)
        return hidden[:, 0].clamp(-1, 1)


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Places of lengths that share a pass: no one is twice as long as another, so padding is less than half of it."""
    by_size: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_size.setdefault((length - 1).bit_length(), []).append(place)
    return list(by_size.values())


class _Kept:
    """Keys and values of several streams, kept and new: what transformers' layers ask for as a cache."""

    def __init__(self, states: Sequence[StreamState]) -> None:
        self._size = states[0].keys.shape[2]
        self._keys = list(torch.stack([state.keys for state in states], 1))
        self._values = list(torch.stack([state.values for state in states], 1))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        self._keys[layer] = torch.cat([self._keys[layer], keys], 2)
        self._values[layer] = torch.cat([self._values[layer], values], 2)
        return self._keys[layer], self._values[layer]

    def after(self, place: int, count: int) -> list[torch.Tensor]:
        """What a stream keeps, which had `count` new codes: copies, so that the others' are freed."""
        ours = slice(count, count + self._size)
        return [torch.stack([each[place, :, ours] for each in layers]) for layers in (self._keys, self._values)]
