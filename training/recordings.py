"""Spoken sentences on the training device: made noisy, loud, long and fast, and read as the processor reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
import torch

from training.mel import mel_filters
from training.pool import FULL_SCALE

RATE_HZ: Final = 16_000
HOP, WINDOW, MEL_BINS = 160, 400, 128


@dataclass(frozen=True, slots=True)
class Hearing:
    """How one sound is heard: `piece` of the pool, `samples` long in all.

    `before`: samples of silence ahead of it. `speed`: of 1, of the recording. `gain`: of 1. `noise`: of the speech's
    loudness.
    """

    piece: int
    samples: int
    before: int = 0
    speed: float = 1.0
    gain: float = 1.0
    noise: float = 0.0

    @property
    def tokens(self) -> int:
        return tokens_of(self.samples)


def frames_of(samples: int) -> int:
    return -(-samples // HOP)


def tokens_of(samples: int) -> int:
    """Of the thinker's prompt: four frames each."""
    return ((frames_of(samples) - 1) // 2 + 1) // 2


def drawn_hearing(piece: int, recorded: int, rng: Random) -> Hearing:
    """As people are recorded: `recorded` samples, with silence around them, at any loudness, often in noise."""
    speed = rng.uniform(0.9, 1.1) if rng.random() < 0.5 else 1.0
    before, after = (int(rng.uniform(0, 0.7) * RATE_HZ) for _ in range(2))
    noise_db = rng.choice([None, -20.0, rng.uniform(-35, -12)])
    return Hearing(
        piece,
        samples=before + int(recorded / speed) + after,
        before=before,
        speed=speed,
        gain=10 ** (rng.uniform(-18, 6) / 20),
        noise=0.0 if noise_db is None else 10 ** (noise_db / 20),
    )


def examined_hearing(piece: int, recorded: int, rng: Random) -> Hearing:
    """In noise at 20 dB, a little silence around."""
    before, after = (int(rng.uniform(0.1, 0.4) * RATE_HZ) for _ in range(2))
    return Hearing(piece, before + recorded + after, before=before, noise=0.1)


class Recordings:
    """All pieces of a pool on one device, int16."""

    def __init__(self, samples: np.ndarray, begins: np.ndarray, device: torch.device) -> None:
        """`begins`: of each piece, and the end."""
        self._samples = torch.from_numpy(samples).to(device)
        self._begins = torch.from_numpy(begins).to(device)
        self._filters = mel_filters(MEL_BINS, WINDOW, RATE_HZ, device)
        self._window = torch.hann_window(WINDOW, device=device)

    @torch.no_grad()
    def heard(self, hearings: Sequence[Hearing], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Features float32 `[n, 128, frames]`, zero behind each sound's own, and how many each has."""
        device = self._samples.device
        # In full precision, as the processor reads it, whatever the model computes in.
        with torch.autocast(device.type, enabled=False):
            waves = self.waves(hearings, seed)
            frames = torch.tensor([frames_of(each.samples) for each in hearings], device=device)
            return self._features(waves, frames), frames

    def waves(self, hearings: Sequence[Hearing], seed: int) -> torch.Tensor:
        """float32 `[n, samples]`, zero behind each sound, with room for the last window of the longest."""
        device = self._samples.device
        longest = max(each.samples for each in hearings)
        columns = torch.tensor(
            [(each.piece, each.samples, each.before, each.speed, each.gain, each.noise) for each in hearings],
            dtype=torch.float64, device=device,
        ).unbind(1)  # fmt: skip
        piece, samples, before = (column.long()[:, None] for column in columns[:3])
        speed, gain, noise = (column.float()[:, None] for column in columns[3:])
        at = torch.arange(-(-(longest + WINDOW // 2) // HOP) * HOP, device=device)[None]
        speech = self._read(piece, (at - before) * speed)
        loudness = speech.square().sum(1, keepdim=True).div_((speech != 0).sum(1, keepdim=True).clamp_(min=1)).sqrt_()
        hiss = torch.randn(speech.shape, generator=torch.Generator(device).manual_seed(seed), device=device)
        wave = (speech + hiss * (loudness * noise)) * gain
        return torch.where(at < samples, wave.clamp_(-1, 1), 0)

    def _read(self, piece: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The pieces' samples at fractions of places, between which they go in a line; zero outside of them."""
        begin, end = self._begins[piece], self._begins[piece + 1]
        floor = at.floor()
        part, low = at - floor, floor.long() + begin
        inside = (low >= begin) & (low < end)
        low = low.clamp(min=0, max=len(self._samples) - 1)
        high = torch.minimum(low + 1, end - 1).clamp_(min=0)
        read = self._samples[low].float() * (1 - part) + self._samples[high].float() * part
        return torch.where(inside, read / FULL_SCALE, 0)

    def _features(self, waves: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """What `WhisperFeatureExtractor` makes of each."""
        spectrum = torch.stft(waves, WINDOW, HOP, window=self._window, return_complex=True)[..., :-1].abs().square()
        features = (self._filters @ spectrum).clamp_(min=1e-10).log10_()
        features = torch.maximum(features, features.amax((1, 2), keepdim=True) - 8.0).add_(4.0).div_(4.0)
        valid = torch.arange(features.shape[2], device=waves.device) < frames[:, None]
        return features.masked_fill_(~valid[:, None], 0)[..., : int(frames.max())]
