"""Weights averaged over the last steps: what is used of flow and vocoder in the end."""

from __future__ import annotations

from typing import Any

import torch


class Average:
    """Of some `steps`, but at first only of a tenth of those that there were: the oldest ones are much worse."""

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
