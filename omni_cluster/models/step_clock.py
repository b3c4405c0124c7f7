"""How long steps take on the device, and that no more than two of them wait there."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

from omni_cluster.models.sound import StepTime

MOST_AHEAD = 1
"""Steps that the device may have before it besides the one it makes: one, or it would idle while the next is chosen."""


class StepClock:
    """Measures steps by the device's own clock, without waiting for the last of them."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._latest: StepTime | None = None

    @contextlib.contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """A step of jobs of this size is launched inside."""
        if not self._on_cuda:
            started_s = time.perf_counter()
            yield
            self._latest = StepTime(size, time.perf_counter() - started_s)
            return
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        began.record()
        yield
        ended.record()
        self._under_way.append((size, began, ended))

    def latest(self) -> StepTime | None:
        """The step that ended last and was not reported yet; waits until no more than `MOST_AHEAD` are under way."""
        while len(self._under_way) > MOST_AHEAD:
            size, began, ended = self._under_way.popleft()
            ended.synchronize()
            self._latest = StepTime(size, began.elapsed_time(ended) / 1000)
        latest, self._latest = self._latest, None
        return latest
