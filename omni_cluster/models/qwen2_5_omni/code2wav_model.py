"""Codes to waveform: transformers' flow-matching DiT and BigVGAN, many requests in one pass.

The reference computes one request at a time. Here requests of different lengths share the DiT's forward passes:
padded frames are masked out of attention, the only place where frames meet, so each request's mel is what it would
be alone. BigVGAN's convolutions reach across a request's end, so only requests of equal length share those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_cluster.models.checkpoint_files import load_tensors
from omni_cluster.models.family import DiffusionJob
from omni_cluster.models.qwen2_5_omni.voices import Voice

WEIGHT_PREFIX = "token2wav."
SAMPLE_RATE_HZ = 24_000
NUM_STEPS = 10
GUIDANCE_SCALE = 0.5
SWAY_COEFFICIENT = -1.0
OUT_OF_REACH = 1 << 20
"""A distance in blocks that no layer of the DiT looks across."""

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DiTCondition:
    """What does not change over a sample's evaluations, for a batch of B requests and n frames.

    `inputs` `[2B, n, C]`: speaker encoding, code embedding and voice conditioning as the DiT's input projection takes
    them, the guided half first, the unguided after it. `block_distance` int `[2B, heads, n, n]`.
    """

    inputs: torch.Tensor
    block_distance: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


class Code2WavModel:
    """A `DiffusionModel`: whole waveforms, 24 kHz."""

    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(
        self, folder: Path, voices: dict[str, Voice], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = load_token2wav(folder, device, dtype)
        self._dit = self._model.code2wav_dit_model
        self._bigvgan = self._model.code2wav_bigvgan_model
        self._device, self._dtype = device, dtype
        self._voices = {name: self._encode_voice(voice) for name, voice in voices.items()}

    @torch.inference_mode()
    def generate(self, jobs: Sequence[DiffusionJob]) -> list[np.ndarray]:
        """One waveform a job, `[480 * codes]` float32 in [-1, 1]."""
        mels = self._sample_mels(jobs)
        waves: list[np.ndarray] = [np.empty(0, np.float32)] * len(jobs)
        for group in _equal_lengths(jobs):
            batch = torch.stack([mels[i] for i in group])
            for i, wave in zip(group, self._vocode(batch), strict=True):
                waves[i] = wave
        return waves

    def _encode_voice(self, voice: Voice) -> torch.Tensor:
        """Speaker encoding and conditioning, guided and unguided: `[2, enc_dim + 192]`."""
        mel = voice.reference_mel.to(self._device, self._dtype)
        conditioning = voice.conditioning.to(self._device, self._dtype)
        with torch.inference_mode():
            encoder = self._dit.input_embed.spk_encoder
            encoded = torch.cat([encoder(mel), encoder(torch.zeros_like(mel))])
        return torch.cat([encoded, torch.cat([conditioning, torch.zeros_like(conditioning)])], dim=-1)

    def _sample_mels(self, jobs: Sequence[DiffusionJob]) -> list[torch.Tensor]:
        """Mel spectrograms `[80, frames]` by the reference's ODE from each job's own noise."""
        lengths = [job.frames for job in jobs]
        noise = torch.zeros(len(jobs), max(lengths), self._dit.mel_dim, device=self._device, dtype=self._dtype)
        for i, job in enumerate(jobs):
            noise[i, : job.frames] = self._noise(job)
        condition = self._condition(jobs, max(lengths))
        mels = integrate(self._velocity(condition), noise, time_points(noise))
        return [mel[:length].T for mel, length in zip(mels, lengths, strict=True)]

    def _noise(self, job: DiffusionJob) -> torch.Tensor:
        """`[frames, 80]`, drawn on the host so that a seed means the same on every device."""
        generator = torch.Generator().manual_seed(job.seed)
        return torch.randn([1, job.frames, self._dit.mel_dim], generator=generator)[0].to(self._device, self._dtype)

    def _condition(self, jobs: Sequence[DiffusionJob], num_frames: int) -> DiTCondition:
        voices = torch.stack([self._voices[job.voice] for job in jobs], dim=1)  # [2, B, enc_dim + 192]
        voices = voices.flatten(0, 1).unsqueeze(1).expand(-1, num_frames, -1)
        encoded, conditioning = voices.split(
            [self._dit.config.enc_dim, voices.shape[-1] - self._dit.config.enc_dim], -1
        )
        codes = torch.zeros(len(jobs), num_frames // self._dit.repeats, dtype=torch.long)
        for i, job in enumerate(jobs):
            codes[i, : len(job.codes)] = torch.tensor(job.codes)
        codes = codes.to(self._device)
        embedded = torch.cat([self._dit.text_embed(codes), self._dit.text_embed(codes, drop_code=True)])
        positions = torch.arange(num_frames, device=self._device).expand(2 * len(jobs), -1)
        return DiTCondition(
            torch.cat([encoded, embedded, conditioning], dim=-1),
            self._block_distance([job.frames for job in jobs], num_frames),
            self._dit.rotary_embed(embedded, positions),
        )

    def _block_distance(self, lengths: Sequence[int], num_frames: int) -> torch.Tensor:
        """How many blocks key j is ahead of query i; out of reach for padded keys, but for the frame itself."""
        frames = torch.arange(num_frames, device=self._device)
        blocks = frames // self._dit.block_size
        distance = (blocks[None, :] - blocks[:, None]).expand(len(lengths), -1, -1)
        padded = frames[None, :] >= torch.tensor(lengths, device=self._device)[:, None]
        others = frames[None, :] != frames[:, None]
        distance = distance.masked_fill(padded[:, None, :] & others, OUT_OF_REACH)
        return distance.repeat(2, 1, 1).unsqueeze(1).expand(-1, self._dit.num_attention_heads, -1, -1)

    def _velocity(self, condition: DiTCondition) -> Velocity:
        """The guided velocity field: `[B, n, 80]` at a time -> `[B, n, 80]`."""

        def velocity(time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            guided, unguided = self._forward(time, state, condition).chunk(2)
            return guided + (guided - unguided) * GUIDANCE_SCALE

        return velocity

    def _forward(self, time: torch.Tensor, state: torch.Tensor, condition: DiTCondition) -> torch.Tensor:
        dit = self._dit
        time_embedding = dit.time_embed(time.repeat(2 * state.shape[0]))
        hidden = dit.input_embed.proj(torch.cat([state.repeat(2, 1, 1), condition.inputs], dim=-1))
        for block in dit.transformer_blocks:
            hidden = block(
                hidden, time_embedding, position_embeddings=condition.rotary, block_diff=condition.block_distance
            )
        return dit.proj_out(dit.norm_out(hidden, time_embedding))

    def _vocode(self, mels: torch.Tensor) -> list[np.ndarray]:
        """Mels `[B, 80, n]` of equal length -> B waveforms."""
        waves = self._bigvgan(mels).float()
        return list(waves.reshape(mels.shape[0], -1).numpy())


def time_points(like: torch.Tensor) -> torch.Tensor:
    """The reference's sway-sampled times, `[NUM_STEPS]` from 0 to 1."""
    times = torch.linspace(0, 1, NUM_STEPS, device=like.device, dtype=like.dtype)
    return times + SWAY_COEFFICIENT * (torch.cos(torch.pi / 2 * times) - 1 + times)


def integrate(velocity: Velocity, state: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The 3/8-rule Runge-Kutta method of the reference (`RungeKutta4ODESolver`), one step between two times."""
    for start, end in itertools.pairwise(times):
        step = end - start
        k1 = velocity(start, state)
        k2 = velocity(start + step * (1 / 3), state + step * k1 * (1 / 3))
        k3 = velocity(start + step * (2 / 3), state + step * (k2 - k1 * (1 / 3)))
        k4 = velocity(end, state + step * (k1 - k2 + k3))
        state = state + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return state


def load_token2wav(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2_5OmniToken2WavModel:
    """The checkpoint's token2wav on `device`, nothing else of the checkpoint read."""
    config = Qwen2_5OmniConfig.from_pretrained(folder).token2wav_config
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = Qwen2_5OmniToken2WavModel(config)
    model.load_state_dict(load_tensors(folder, WEIGHT_PREFIX, device))
    return model.to(dtype).eval()


def _equal_lengths(jobs: Sequence[DiffusionJob]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, job in enumerate(jobs):
        groups.setdefault(job.frames, []).append(i)
    return list(groups.values())
