"""What the trainings of audio tower, thinker and talker share: steps of many batches, and examinations by kind."""

from __future__ import annotations

import argparse
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from training.cores import CORES
from training.files import written_whole
from training.run import Clock, Plan, Run, descend, run_options

Given = TypeVar("Given")
WARM_UP: Final = 0.05
EXAMINED_EVERY_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan(Plan):
    """`pieces`, `pictures`: how many sounds and drawings are made, and kept in `pool`. `exam`: held-out ones.

    `size`: what a step has of them. `workers`: processes that make batches; 0: none beside this one. `rate`: the
    highest one.
    """

    pieces: int = 60_000
    pictures: int = 12_000
    exam: int = 600
    pool: Path | None = None
    size: int = 128
    workers: int = 0
    rate: float = 1.5e-3


@dataclass(frozen=True, slots=True)
class Guesses:
    """What is likeliest at each target, and what is right. `owners`: whose each target is, an index of `kinds`."""

    made: torch.Tensor
    targets: np.ndarray
    owners: np.ndarray
    kinds: Sequence[str]


class Trainer(ABC, Generic[Given]):
    """One run. The folder gets its weights, and what came out of the last examination, each time there is one."""

    name: ClassVar[str]
    shares: ClassVar[Mapping[str, float]]
    """Of each part of the loss."""

    def __init__(
        self, plan: TrainerPlan, learner: nn.Module, data: Dataset[list[Given]], exam: Sequence[Given]
    ) -> None:
        self._plan = plan
        self._device = torch.device(plan.device)
        self.learner = learner.to(self._device)
        self._optimizer = _optimizer(learner, plan.rate, is_fused=self._device.type == "cuda")
        self._data = data
        self._exam = exam
        self.run = Run(self.name, plan, {"model": self.learner, "optimizer": self._optimizer})

    @abstractmethod
    def losses(self, given: Given, seed: int) -> Mapping[str, torch.Tensor]:
        """The sums of the loss's parts."""

    @abstractmethod
    def counts(self, given: Given) -> Mapping[str, int]:
        """What each of the sums is divided by."""

    @abstractmethod
    def guesses(self, given: Given, seed: int) -> Guesses: ...

    @abstractmethod
    def weights(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Of the files that are kept of what is trained: by the file's name, and the tensor's."""

    def train(self) -> Mapping[str, float]:
        """The accuracies at the end, by kind."""
        examines = Clock(EXAMINED_EVERY_S)
        for step, given in zip(self.run.steps(), self._batches(), strict=False):
            self.learn(given, step)
            if examines.strikes():
                self._keep(self.examine())
        self._keep(accuracies := self.examine())
        return accuracies

    def _batches(self) -> Iterator[list[Given]]:
        # A loader's workers read it by step, so their number changes nothing.
        yield from DataLoader(
            self._data, sampler=itertools.count(self.run.step), batch_size=None,
            num_workers=self._plan.workers, prefetch_factor=4 if self._plan.workers else None,
            worker_init_fn=_one_thread, collate_fn=_as_it_is,
        )  # fmt: skip

    def learn(self, given: Sequence[Given], step: int) -> None:
        """One step, of all batches that it is given."""
        totals = Counter[str]()
        for each in given:
            totals.update(self.counts(each))
        means: dict[str, Any] = dict.fromkeys(self.shares, 0.0)

        def losses() -> Iterator[torch.Tensor]:
            for number, each in enumerate(given):
                with self._autocast():
                    sums = self.losses(each, step * 64 + number)
                parts = {name: total / max(1, totals[name]) for name, total in sums.items()}
                for name, part in parts.items():
                    means[name] = means[name] + part.detach()
                yield torch.stack([self.shares[name] * part for name, part in parts.items()]).sum()

        rate = self.run.rate(self._plan.rate, WARM_UP)
        gradient = descend(self._optimizer, losses(), rate, longest=1.0)
        self.run.tell(**means, gradient=gradient, rate=rate)

    @torch.no_grad()
    def examine(self) -> dict[str, float]:
        """The share of each kind of which all is right that greedy decoding would make.

        It makes it where each token is the likeliest one behind the right ones before it.
        """
        right, asked = Counter[str](), Counter[str]()
        self.learner.eval()
        for number, given in enumerate(self._exam):
            with self._autocast():
                guesses = self.guesses(given, seed=number)
            wrong = (guesses.made.cpu().numpy() != guesses.targets).astype(np.int64)
            mistakes = np.bincount(guesses.owners, wrong, minlength=len(guesses.kinds))
            asked.update(guesses.kinds)
            right.update(kind for kind, count in zip(guesses.kinds, mistakes, strict=True) if count == 0)
        self.learner.train()
        return {way: _share(way, right, asked) for way in sorted({*asked, *(kind.split()[0] for kind in asked)})}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _keep(self, accuracies: Mapping[str, float]) -> None:
        for name, tensors in self.weights().items():
            with written_whole(self._plan.out / name) as file:
                save_file({name: each.cpu() for name, each in tensors.items()}, file, metadata={"format": "pt"})
        self.run.say("right: " + ", ".join(f"{kind} {share:.3f}" for kind, share in accuracies.items()))
        with written_whole(self._plan.out / f"{self.name}.json") as file:
            file.write_text(json.dumps({"step": self.run.step, "accuracies": accuracies}, indent=1))


def halved(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Its weights by the hub's names, in half precision."""
    return {f"{prefix}.{name}": each.half() for name, each in model.state_dict().items()}


def _share(way: str, right: Mapping[str, int], asked: Mapping[str, int]) -> float:
    kinds = [kind for kind in asked if kind == way or kind.split()[0] == way]
    return sum(right.get(kind, 0) for kind in kinds) / sum(asked[kind] for kind in kinds)


def _as_it_is(given: list[Given]) -> list[Given]:
    return given


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _optimizer(learner: nn.Module, rate: float, is_fused: bool) -> torch.optim.AdamW:
    """Matrices alone decay, and of these not the embeddings."""
    decays: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad:
            decays[parameter.ndim > 1 and "embed_tokens" not in name].append(parameter)
    groups = [{"params": decays[True], "weight_decay": 0.05}, {"params": decays[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.97), fused=is_fused)


def trainer_options(about: str, *counts: str) -> argparse.ArgumentParser:
    """`counts`: options that are numbers, beside those of all trainings."""
    parser = run_options(about)
    parser.add_argument("--pool", type=Path, help="a folder that keeps sounds and pictures for the next run")
    parser.add_argument("--workers", type=int, default=CORES, help="processes that make batches")
    parser.add_argument("--rate", type=float, help="the highest one")
    for name in ("pieces", "pictures", "exam", "size", *counts):
        parser.add_argument(f"--{name}", type=int)
    return parser
