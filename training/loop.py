"""The loop that trains a part of the toy: it goes on where it was, says how far it is, and keeps what it has."""

from __future__ import annotations

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

Given = TypeVar("Given")
SAY_EVERY_S, SAVE_EVERY_S = 20.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`minutes` of this run, `of_minutes` of all runs together, over which the learning rate falls to nothing.

    `steps`: the most of this run. `rate`: the learning rate after `warm_up` steps. `workers`: processes that make
    batches; 0: none beside this one.
    """

    out: Path
    minutes: float
    of_minutes: float
    steps: int = 1 << 40
    rate: float = 1.5e-3
    warm_up: int = 300
    seed: int = 0
    workers: int = 0
    device: str = "cpu"
    exam_every_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Guesses:
    """What is likeliest at each target, and what is right. `owners`: whose each target is, an index of `kinds`."""

    made: torch.Tensor
    targets: np.ndarray
    owners: np.ndarray
    kinds: Sequence[str]


class Trainer(ABC, Generic[Given]):
    """One run. The folder has its state, its log, and what came out of the last examination."""

    name: ClassVar[str]
    shares: ClassVar[Mapping[str, float]]
    """Of each part of the loss."""

    def __init__(self, run: Run, learner: nn.Module, data: Dataset[list[Given]], exam: Sequence[Given]) -> None:
        self._run = run
        self._device = torch.device(run.device)
        self.learner = learner.to(self._device)
        self._optimizer = _optimizer(learner, run)
        self._data = data
        self._exam = exam
        self.step, self._earlier_s = 0, 0.0
        self._log = self._file("log").open("a")
        self._resume()

    @abstractmethod
    def losses(self, given: Given, seed: int) -> Mapping[str, torch.Tensor]:
        """The sums of the loss's parts."""

    @abstractmethod
    def counts(self, given: Given) -> Mapping[str, int]:
        """What each of the sums is divided by."""

    @abstractmethod
    def guesses(self, given: Given, seed: int) -> Guesses: ...

    @abstractmethod
    def write_weights(self) -> None:
        """In half precision, by the hub's names."""

    def train(self) -> Mapping[str, float]:
        """Trains for the run's minutes; the accuracies at the end, by kind."""
        began = saved = examined = said = time.monotonic()
        sums = defaultdict[str, Any](int)
        for given in self._batches():
            now = time.monotonic()
            if now - began > 60 * self._run.minutes or self._progress(now - began) >= 1:
                break
            for name, value in self._learn(given, self._progress(now - began)).items():
                sums[name] += value
            self.step += 1
            if now - said > SAY_EVERY_S:
                self._say_losses(sums, time.monotonic() - said, now - began)
                sums, said = defaultdict(int), time.monotonic()
            if now - saved > SAVE_EVERY_S:
                self._save(now - began)
                saved = time.monotonic()
            if now - examined > self._run.exam_every_s:
                self._keep(self.examine())
                sums, said = defaultdict(int), time.monotonic()
                examined = said
        self._save(time.monotonic() - began)
        self._keep(accuracies := self.examine())
        return accuracies

    def _batches(self) -> Iterator[list[Given]]:
        # A loader's workers read it by step, so their number changes nothing.
        return iter(
            DataLoader(
                self._data, sampler=range(self.step, self.step + self._run.steps), batch_size=None,
                num_workers=self._run.workers, prefetch_factor=4 if self._run.workers else None,
                worker_init_fn=_one_thread, collate_fn=_as_it_is,
            )
        )  # fmt: skip

    def _learn(self, given: Sequence[Given], progress: float) -> dict[str, Any]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._run.rate * _share_of_rate(self.step, self._run.warm_up, progress)
        totals = Counter[str]()
        for each in given:
            totals.update(self.counts(each))
        means: dict[str, Any] = {name: torch.zeros((), device=self._device) for name in self.shares}
        for number, each in enumerate(given):
            with self._autocast():
                sums = self.losses(each, self.step * 64 + number)
            parts = {name: total / max(1, totals[name]) for name, total in sums.items()}
            torch.stack([self.shares[name] * part for name, part in parts.items()]).sum().backward()
            for name, part in parts.items():
                means[name] += part.detach()
        norm = nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        if norm.isfinite():  # else one batch of many would spoil all
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**means, "gradient": norm, "tokens": totals["tokens"], "steps": 1}

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

    # ------------------------------------------------------------------- state and words

    def _file(self, ending: str) -> Path:
        return self._run.out / f"{self.name}.{ending}"

    def _progress(self, seconds: float) -> float:
        return min(1.0, (self._earlier_s + seconds) / (60 * self._run.of_minutes))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _resume(self) -> None:
        if not self._file("pt").is_file():
            return
        state = torch.load(self._file("pt"), map_location=self._device, weights_only=True)
        self.learner.load_state_dict(state["learner"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._earlier_s = state["step"], state["seconds"]
        self._say(f"goes on at step {self.step}, {self._earlier_s:.0f} s of training")

    def _save(self, seconds: float) -> None:
        partial = self._file("partial")
        state = {
            "learner": self.learner.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.step,
            "seconds": self._earlier_s + seconds,
        }  # fmt: skip
        torch.save(state, partial)
        partial.replace(self._file("pt"))

    def _keep(self, accuracies: Mapping[str, float]) -> None:
        self.write_weights()
        self._say("right: " + ", ".join(f"{kind} {share:.3f}" for kind, share in accuracies.items()))
        self._file("json").write_text(json.dumps({"step": self.step, "accuracies": accuracies}, indent=1))

    def _say_losses(self, sums: dict[str, Any], of_s: float, at_s: float) -> None:
        steps, tokens = sums.pop("steps"), sums.pop("tokens")
        means = ", ".join(f"{name} {float(total) / steps:.3f}" for name, total in sums.items())
        rate = self._optimizer.param_groups[0]["lr"]
        speed = f"{steps / of_s:.2f} steps/s, {tokens / of_s:,.0f} tokens/s"
        self._say(f"step {self.step} at {at_s:.0f} s: {means}, rate {rate:.1e}, {speed}")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()


def _share_of_rate(step: int, warm_up: int, progress: float) -> float:
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))


def _share(way: str, right: Mapping[str, int], asked: Mapping[str, int]) -> float:
    kinds = [kind for kind in asked if kind == way or kind.split()[0] == way]
    return sum(right.get(kind, 0) for kind in kinds) / sum(asked[kind] for kind in kinds)


def _as_it_is(given: list[Given]) -> list[Given]:
    return given


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _optimizer(learner: nn.Module, run: Run) -> torch.optim.AdamW:
    """Matrices alone decay, and of these not the embeddings."""
    decays: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad:
            decays[parameter.ndim > 1 and "embed_tokens" not in name].append(parameter)
    groups = [{"params": decays[True], "weight_decay": 0.05}, {"params": decays[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.97), fused=run.device != "cpu")


# ------------------------------------------------------------------- commands


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the toy's folder")
    parser.add_argument("--minutes", type=float, required=True, help="of this run")
    parser.add_argument("--of-minutes", type=float, help="of all runs of this training; this one's, unless given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("steps", "warm_up", "seed", "workers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("rate", "exam_every_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)


def given_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What of the options is given, by its name."""
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    return {"of_minutes": given["minutes"], **given}
