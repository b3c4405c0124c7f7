"""Small things that code2wav is trained on without espeak-ng, and a clock that steps of training turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from training import run
from training.mel import log_mel
from training.saying import ANSWER_HZ, SAMPLES_A_CODE
from training.wave_data import Sayings


def chord(codes: int, hz: float = 200.0) -> np.ndarray:
    """Float32 `[480 codes]`: harmonics that grow from nearly nothing."""
    times = np.arange(codes * SAMPLES_A_CODE) / ANSWER_HZ
    waves = [np.sin(2 * np.pi * hz * harmonic * times) / harmonic for harmonic in range(1, 9)]
    return (0.2 * sum(waves) * 10 ** (3 * times / times[-1] - 3)).astype(np.float32)


def sayings_of(count: int = 1, codes: int = 24) -> Sayings:
    """In one voice; each of another pitch, with a code of its own to each moment."""
    sounds = [chord(codes, 200 + 50 * number) for number in range(count)]
    mels = [log_mel(torch.from_numpy(sound)[None])[0].numpy().astype(np.float16) for sound in sounds]
    strings = [np.arange(2 + number * codes, 2 + (number + 1) * codes).astype(np.int16) for number in range(count)]
    whole = [(sound * (2**15 - 1)).astype(np.int16) for sound in sounds]
    return Sayings([f"chord {number}" for number in range(count)], strings, [whole], [mels], {"Ethan": voice()})


def voice(number: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return {"cond": torch.randn(1, 192, generator=drawn), "ref_mel": torch.randn(1, 100, 80, generator=drawn) - 5}


@contextmanager
def seconds_are_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To a training each step of an optimizer takes a second, and nothing else takes any time."""
    taken = 0

    def count(*_: Any) -> None:
        nonlocal taken
        taken += 1

    monkeypatch.setattr(run.time, "monotonic", lambda: float(taken))
    counted = register_optimizer_step_post_hook(count)
    yield
    counted.remove()
    monkeypatch.undo()
