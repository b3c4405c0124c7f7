"""A run: some minutes of a training, which goes on where the run before ended, until all its minutes are over.

All trainings are such runs. The state is kept once a minute and at the end. What is drawn goes on, too: a training
in several runs learns what it would learn in one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from training.files import written_whole

SAY_EVERY_S: Final = 20.0
SAVE_EVERY_S: Final = 60.0
LOWEST: Final = 0.01
"""Of the highest learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`minutes` of training in all; a run makes `at_most` so many of them, if that is given.

    `out`: the folder of the state, the log and what comes out of the training.
    """

    out: Path
    minutes: float
    at_most: float | None = None
    seed: int = 0
    device: str = "cpu"


class Part(Protocol):
    """What a training is made of: a module, an optimizer, an average."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Clock:
    """Says when some seconds have passed since it last said so."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._last = every_s, time.monotonic()

    def strikes(self) -> bool:
        if time.monotonic() - self._last < self._every_s:
            return False
        self._last = time.monotonic()
        return True


class Run:
    """`NAME.pt` in the plan's folder has the state of all parts, `NAME.log` the log."""

    def __init__(self, name: str, plan: Plan, parts: Mapping[str, Part]) -> None:
        plan.out.mkdir(parents=True, exist_ok=True)
        self._state, self._log = plan.out / f"{name}.pt", plan.out / f"{name}.log"
        self._parts = parts
        self._total_s = plan.minutes * 60
        self._most_s = self._total_s if plan.at_most is None else plan.at_most * 60
        self._told = defaultdict[str, list[Any]](list)
        self.step, self._earlier_s, self._begun = 0, 0.0, time.monotonic()
        if self._state.is_file():
            self._go_on()

    @property
    def progress(self) -> float:
        """Of the whole training, from 0 to 1."""
        return min(1.0, self._seconds / self._total_s)

    @property
    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._begun

    @property
    def _minutes_so_far(self) -> str:
        return f"{self._seconds / 60:.1f} of {self._total_s / 60:g} minutes"

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, as long as there is time."""
        says, saves = Clock(SAY_EVERY_S), Clock(SAVE_EVERY_S)
        while self.progress < 1 and time.monotonic() - self._begun < self._most_s:
            yield self.step
            self.step += 1
            if says.strikes():
                self._say_means()
            if saves.strikes():
                self._save()
        self._say_means()
        self._save()

    def rate(self, highest: float, warm_up: float = 0.01) -> float:
        """The learning rate: it rises in the `warm_up` of the training, and falls on a half cosine."""
        risen = min(1.0, self.progress / warm_up + LOWEST)
        fallen = (1 + math.cos(math.pi * self.progress)) / 2
        return highest * risen * (LOWEST + (1 - LOWEST) * fallen)

    def tell(self, **values: torch.Tensor | float) -> None:
        """Of one step: the log has their means."""
        for name, value in values.items():
            self._told[name].append(value.detach() if isinstance(value, torch.Tensor) else value)

    def say(self, line: str) -> None:
        print(line, flush=True)
        with self._log.open("a") as log:
            log.write(f"{line}\n")

    def _say_means(self) -> None:
        means = [f"{name} {float(sum(values)) / len(values):.4g}" for name, values in self._told.items()]
        self._told.clear()
        if means:
            self.say(f"step {self.step}, {self._minutes_so_far}: {', '.join(means)}")

    def _save(self) -> None:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        with written_whole(self._state) as file:
            torch.save({"step": self.step, "seconds": self._seconds, "parts": states, "random": _random()}, file)

    def _go_on(self) -> None:
        kept = torch.load(self._state, map_location="cpu", weights_only=True)
        self.step, self._earlier_s = kept["step"], kept["seconds"]
        for name, part in self._parts.items():
            part.load_state_dict(kept["parts"][name])
        _draw_on(kept["random"])
        self.say(f"goes on at step {self.step}, {self._minutes_so_far}")


def _random() -> dict[str, torch.Tensor]:
    """Where the generators are, of the CPU and of the card if there is one."""
    on_card = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_card}


def _draw_on(random: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def descend(
    optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor], rate: float | torch.Tensor, longest: float
) -> torch.Tensor:
    """A step down the gradients of all losses together, which are shortened to `longest`; the length that they had.

    One batch of many must not spoil all: gradients that are no numbers are left out. A fused optimizer that is
    capturable, too, finds that out on the device.
    """
    optimizer.zero_grad(set_to_none=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for loss in losses:
        loss.backward(inputs=parameters)
    length = torch.nn.utils.clip_grad_norm_(parameters, longest)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if optimizer.defaults.get("capturable"):
        vars(optimizer)["found_inf"] = (~length.isfinite()).float()  # the name that torch reads it by
        optimizer.step()
    elif length.isfinite():
        optimizer.step()
    return length


# ------------------------------------------------------------------- commands


def run_options(about: str) -> argparse.ArgumentParser:
    """Those that every training has."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the state, the log and the weights")
    parser.add_argument(
        "--minutes", type=minutes_of_text, required=True, help="of training in all, in one run or in several"
    )
    parser.add_argument("--at-most", type=minutes_of_text, help="minutes of this run; all that are left, unless given")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def given_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What of the options is given, by its name."""
    return {name: value for name, value in vars(parser.parse_args()).items() if value is not None}


def minutes_of_text(text: str) -> float:
    if not 0 < (minutes := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no length of time: give minutes above 0, such as 8 or 0.5.")
    return minutes
