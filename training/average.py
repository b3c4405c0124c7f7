"""Weights averaged over the last steps: what is used of flow and vocoder in the end."""

from __future__ import annotations

from typing import Any

import torch


class Average:
    """Of some `steps`, but at first only of a tenth of those that there were: the oldest ones are much worse."""

    def __init__(self, model: torch.nn.Module, steps: int = 1000) -> None:
        self._weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._model, self._steps = model, steps
        self._count = torch.zeros((), dtype=torch.int64, device=next(iter(self._weights.values())).device)

    @torch.no_grad()
    def update(self) -> None:
        """Without a wait for the device, so that it can be captured."""
        self._count += 1
        part = (10 / self._count).clamp(1 / self._steps, 1.0)
        now, averages = self._model.state_dict(), [*self._weights.values()]
        ways = torch._foreach_sub([now[name] for name in self._weights], averages)
        torch._foreach_mul_(ways, part)
        torch._foreach_add_(averages, ways)

    def state_dict(self) -> dict[str, Any]:
        return {**self._weights, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count.copy_(state["count"])
        for name, tensor in self._weights.items():
            tensor.copy_(state[name])
