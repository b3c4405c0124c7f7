"""Training in parts: until its minutes are over, kept on disk once a minute, and gone on with from there.

What is drawn goes on too, so a run in parts learns what an unbroken one does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

SAVE_EVERY_S = 60


class Part(Protocol):
    """What is kept: a module or an optimiser."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Training:
    """`minutes` of steps in all, over as many runs as it takes; this run makes `at_most` minutes of them."""

    def __init__(self, path: Path, parts: Mapping[str, Part], minutes: float, at_most: float | None = None) -> None:
        self._path, self._parts = path, parts
        self._total_s, self._begun = minutes * 60, time.monotonic()
        self._most_s = self._total_s if at_most is None else at_most * 60
        self.step, self._before_s = 0, 0.0
        if path.is_file():
            kept = torch.load(path, map_location="cpu", weights_only=True)
            self.step, self._before_s = kept["step"], kept["seconds"]
            for name, part in parts.items():
                part.load_state_dict(kept["parts"][name])
            _draw_on(kept["random"])

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return min(1.0, self._seconds / self._total_s)

    @property
    def _seconds(self) -> float:
        return self._before_s + time.monotonic() - self._begun

    def steps(self) -> Iterator[int]:
        saved = time.monotonic()
        while self.progress < 1 and time.monotonic() - self._begun < self._most_s:
            yield self.step
            self.step += 1
            if time.monotonic() - saved >= SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        half_written = self._path.with_suffix(".writing")
        torch.save({"step": self.step, "seconds": self._seconds, "parts": states, "random": _random()}, half_written)
        os.replace(half_written, self._path)


def _random() -> dict[str, torch.Tensor]:
    """Where the generators are, of the CPU and of the card if there is one."""
    on_card = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_card}


def _draw_on(random: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def falling(progress: float, highest: float, warm_up: float = 0.01) -> float:
    """A learning rate: up to the highest, then down to a hundredth of it on a half cosine."""
    if progress < warm_up:
        return highest * (progress / warm_up + 0.01)
    fallen = (1 + float(torch.cos(torch.tensor(progress * torch.pi)))) / 2
    return highest * (0.01 + 0.99 * fallen)


class Average:
    """Weights averaged over the last steps: what is used of a model in the end.

    Some `steps` of them, but at first only a tenth of those that there were: the oldest ones are much worse.
    """

    def __init__(self, model: torch.nn.Module, steps: int = 1000) -> None:
        self._weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._model, self._steps, self._count = model, steps, 0

    @torch.no_grad()
    def update(self) -> None:
        self._count += 1
        part = min(1.0, max(10 / self._count, 1 / self._steps))
        now = self._model.state_dict()
        torch._foreach_lerp_([*self._weights.values()], [now[name] for name in self._weights], part)

    def state_dict(self) -> dict[str, Any]:
        return {**self._weights, "count": torch.tensor(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])
        for name, tensor in self._weights.items():
            tensor.copy_(state[name])
