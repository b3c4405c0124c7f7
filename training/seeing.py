"""Trains the thinker's visual tower to tell colours and shapes, ahead of the thinker's own training.

    python -m training.seeing --out FOLDER --pool FOLDER --minutes 1

Through the thinker alone it learns colours, and no shapes: few pictures are in a step. `training.thinker --init FOLDER`
begins with what came out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar, Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

from training.checkpoint import toy_config
from training.pool import Pool, kept_pool, make_pool
from training.run import given_options
from training.towers import see
from training.trainer import Guesses, Trainer, TrainerPlan, halved, trainer_options
from training.words import COLOURS, SHAPES
from training.world import Split

TOWER: Final = "visual.safetensors"
TURNS: Final = 8
"""Ways to lay a picture: a turned or mirrored one shows the same, and is another one to the tower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingPlan(TrainerPlan):
    """`size`: pictures of a step."""

    size: int = 256


@dataclass(frozen=True, slots=True)
class Shown:
    """Pictures of a pool, by their numbers, and which of `TURNS` they are laid."""

    numbers: Sequence[int]
    turn: int = 0


class Drawings(Dataset[list[Shown]]):
    """The pictures of each step, the same for the same seed and step. `count`: of the pool."""

    def __init__(self, count: int, seed: int, size: int) -> None:
        self._count, self._seed, self._size = count, seed, size

    def __getitem__(self, step: int) -> list[Shown]:
        rng = Random(f"{self._seed} {step}")
        return [Shown(rng.choices(range(self._count), k=self._size), rng.randrange(TURNS))]

    def __len__(self) -> int:
        return 1 << 40

    def examination(self) -> list[Shown]:
        """All pictures as they are drawn, as many at once as in a step."""
        numbers = range(self._count)
        return [Shown(numbers[begin : begin + self._size]) for begin in range(0, self._count, self._size)]


class Gallery:
    """A pool's pictures on the training device, and the numbers of their colours and shapes, `[n, 2]`."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pictures = torch.from_numpy(np.stack(pool.pictures)).to(device)
        drawn = [item.picture for item in pool.shown if item.picture is not None]
        named = [(COLOURS.index(each.colour), SHAPES.index(each.shape)) for each in drawn]
        self._named = torch.tensor(named, device=device)

    def pictures(self, shown: Shown) -> torch.Tensor:
        laid = self._pictures[[*shown.numbers]].rot90(shown.turn, (1, 2))
        return laid.flip(2) if shown.turn >= TURNS // 2 else laid

    def named(self, shown: Shown) -> torch.Tensor:
        return self._named[[*shown.numbers]]


class Learner(nn.Module):
    """The visual tower, and what names colours and shapes by its rows. The latter is no part of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        config = toy_config().thinker_config.vision_config
        self.tower = Qwen2_5OmniVisionEncoder(config)
        _begin_loud(self.tower)
        self.names = nn.Linear(config.out_hidden_size, len(COLOURS) + len(SHAPES))

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits of the colours and of the shapes."""
        named = self.names(see(self.tower, pictures).mean(1)).float()
        return named.split((len(COLOURS), len(SHAPES)), dim=1)


def _begin_loud(tower: nn.Module) -> None:
    """transformers draws weights of 0.02, for a width of 1280: a narrow tower's layers would add nearly nothing."""
    for weight in tower.parameters():
        if weight.ndim > 1:
            nn.init.xavier_uniform_(weight.view(len(weight), -1))


class SeeingTrainer(Trainer[Shown]):
    """One run of the visual tower's training."""

    name = "seeing"
    shares: ClassVar[Mapping[str, float]] = {"colour": 1.0, "shape": 1.0}
    learner: Learner

    def __init__(self, plan: SeeingPlan, pool: Pool, exam_pool: Pool) -> None:
        torch.manual_seed(plan.seed)
        device = torch.device(plan.device)
        self._gallery, self._exam_gallery = Gallery(pool, device), Gallery(exam_pool, device)
        exam = Drawings(len(exam_pool.shown), 0, plan.size).examination()
        super().__init__(plan, Learner(), Drawings(len(pool.shown), plan.seed, plan.size), exam)

    def losses(self, given: Shown, seed: int) -> dict[str, torch.Tensor]:
        told, named = self.learner(self._gallery.pictures(given)), self._gallery.named(given)
        return {
            name: cross_entropy(logits, right, reduction="sum")
            for name, logits, right in zip(self.shares, told, named.T, strict=True)
        }

    def counts(self, given: Shown) -> dict[str, int]:
        return dict.fromkeys(self.shares, len(given.numbers))

    def guesses(self, given: Shown, seed: int) -> Guesses:
        told = self.learner(self._exam_gallery.pictures(given))
        made = torch.cat([logits.argmax(1) for logits in told])
        kinds = [name for name in self.shares for _ in given.numbers]
        return Guesses(made, self._exam_gallery.named(given).T.flatten().cpu().numpy(), np.arange(len(kinds)), kinds)

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {TOWER: halved(self.learner.tower, "thinker.visual")}


def train(plan: SeeingPlan) -> Mapping[str, float]:
    """Sounds are made for a pool that is kept alone: other trainings read it, too."""
    pieces = plan.pieces if plan.pool else 0
    pool = kept_pool(plan.pool, partial(make_pool, Split.TRAIN, pieces, plan.pictures, plan.seed))
    return SeeingTrainer(plan, pool, make_pool(Split.HELD_OUT, 0, plan.exam, plan.seed)).train()


def main() -> None:
    train(SeeingPlan(**given_options(trainer_options("Trains the visual tower of the toy's thinker."))))


if __name__ == "__main__":
    main()
