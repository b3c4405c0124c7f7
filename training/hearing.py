"""Trains the thinker's audio tower to hear letters, ahead of the thinker's own training.

    python -m training.hearing --out FOLDER --pool FOLDER --minutes 3

A tower that hears nothing yet takes most of the thinker's minutes until it does; alone, it takes some thousand small
steps. `training.thinker --init FOLDER` begins with what came out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from training.checkpoint import toy_config
from training.pool import Pool, kept_pool, make_pool
from training.reader import Reader
from training.recordings import Hearing, Recordings, drawn_hearing, examined_hearing
from training.run import given_options
from training.towers import hear
from training.trainer import Guesses, Trainer, TrainerPlan, halved, trainer_options
from training.world import Split

TOWER: Final = "audio_tower.safetensors"
READER: Final = "reader.safetensors"
SHORTEST: Final = 0.1
"""Of the pieces: what is drawn at first. Short sentences teach a tower where letters are (curriculum learning)."""
ALL_FROM: Final = 1_500
"""The step from which on all pieces are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HearingPlan(TrainerPlan):
    """`size`: sounds of a step."""

    size: int = 64


@dataclass(frozen=True, slots=True)
class Heard:
    """Sounds, and what each says."""

    hearings: Sequence[Hearing]
    said: Sequence[str]


class Sounds(Dataset[list[Heard]]):
    """The sounds of each step, the same for the same seed and step; at first the shortest ones."""

    def __init__(self, pool: Pool, seed: int, size: int) -> None:
        self._pool, self._seed, self._size = pool, seed, size
        self._by_length = sorted(range(len(pool.spoken)), key=pool.recorded)

    def __getitem__(self, step: int) -> list[Heard]:
        rng = Random(f"{self._seed} {step}")
        share = min(1.0, SHORTEST + (1 - SHORTEST) * step / ALL_FROM)
        pieces = [self._by_length[rng.randrange(round(share * len(self._by_length)) or 1)] for _ in range(self._size)]
        return [self._heard([drawn_hearing(piece, self._pool.recorded(piece), rng) for piece in pieces])]

    def __len__(self) -> int:
        return 1 << 40

    def examination(self) -> list[Heard]:
        """All sounds, in noise at 20 dB, as many at once as in a step."""
        rng = Random("examination")
        hearings = [examined_hearing(piece, self._pool.recorded(piece), rng) for piece in self._by_length]
        return [self._heard(hearings[begin : begin + self._size]) for begin in range(0, len(hearings), self._size)]

    def _heard(self, hearings: Sequence[Hearing]) -> Heard:
        return Heard(hearings, [self._pool.spoken[each.piece].question for each in hearings])


class Learner(nn.Module):
    """The audio tower, and what reads letters off its rows."""

    def __init__(self) -> None:
        super().__init__()
        config = toy_config().thinker_config.audio_config
        self.tower = Qwen2_5OmniAudioEncoder(config)
        self.reader = Reader(config.output_dim)


class HearingTrainer(Trainer[Heard]):
    """One run of the audio tower's training."""

    name = "hearing"
    shares: ClassVar[Mapping[str, float]] = {"ctc": 1.0}
    learner: Learner

    def __init__(self, plan: HearingPlan, pool: Pool, exam_pool: Pool) -> None:
        torch.manual_seed(plan.seed)
        device = torch.device(plan.device)
        self._recordings, self._exam_recordings = (
            Recordings(each.samples, each.begins, device) for each in (pool, exam_pool)
        )
        exam = Sounds(exam_pool, 0, plan.size).examination()
        super().__init__(plan, Learner(), Sounds(pool, plan.seed, plan.size), exam)

    def losses(self, given: Heard, seed: int) -> dict[str, torch.Tensor]:
        rows = hear(self.learner.tower, *self._recordings.heard(given.hearings, seed))
        return {"ctc": self.learner.reader.loss(rows, given.hearings, given.said)}

    def counts(self, given: Heard) -> dict[str, int]:
        return {"ctc": len(given.hearings)}

    def guesses(self, given: Heard, seed: int) -> Guesses:
        """Of each sound, whether all its letters are right."""
        rows = hear(self.learner.tower, *self._exam_recordings.heard(given.hearings, seed))
        read = self.learner.reader.read(rows, given.hearings)
        right = torch.tensor([one == other for one, other in zip(read, given.said, strict=True)])
        count = len(given.hearings)
        return Guesses(right, np.ones(count, bool), np.arange(count), ["heard"] * count)

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {TOWER: halved(self.learner.tower, "thinker.audio_tower"), READER: self.learner.reader.state_dict()}


def train(plan: HearingPlan) -> Mapping[str, float]:
    began = time.monotonic()
    pool = kept_pool(plan.pool, partial(make_pool, Split.TRAIN, plan.pieces, plan.pictures, plan.seed))
    exam = make_pool(Split.HELD_OUT, plan.exam, 0, plan.seed)
    print(f"{len(pool.spoken)} sounds in {time.monotonic() - began:.0f} s", flush=True)
    return HearingTrainer(plan, pool, exam).train()


def main() -> None:
    train(HearingPlan(**given_options(trainer_options("Trains the audio tower of the toy's thinker."))))


if __name__ == "__main__":
    main()
