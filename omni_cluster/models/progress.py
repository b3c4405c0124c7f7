"""Whether an engine gets on with its work, by what it says of itself between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from omni_cluster.types.errors import StageDied

ANSWER_S = 1.0
"""How long one look waits for the engine's answer: one in a long step answers at a later look."""
MAX_LAPSE_S = 5.0
"""The longest time between two looks that counts as time in which the engine could have worked: on a host that is busy
or was suspended, the looks are held up as the engine is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`steps` that an engine took so far, and whether it has work that no other stage holds up."""

    steps: int
    has_work: bool


class StallWatch:
    """Tells an engine that hangs from one that is idle or slow: a slow one takes a step now and then."""

    def __init__(self, name: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_s = clock()
        self._still_s = 0.0
        self._steps: int | None = None

    def look(self, progress: Progress | None) -> None:
        """Takes what the engine says, None for no answer. Raises StageDied once it has stood still for too long."""
        now_s = self._clock()
        lapse_s, self._looked_s = min(now_s - self._looked_s, MAX_LAPSE_S), now_s
        stands = progress is None or (progress.has_work and progress.steps == self._steps)
        self._still_s = self._still_s + lapse_s if stands else 0.0
        self._steps = self._steps if progress is None else progress.steps
        if self._still_s > self._timeout_s:
            raise StageDied(
                f"stage {self._name} has taken no step for {self._still_s:.0f} s, and stall_timeout_s is "
                f"{self._timeout_s:g}; send the request again."
            )


class Probe:
    """Asks an engine how it gets on, one question at a time."""

    def __init__(self, ask: Callable[[], Awaitable[Progress]], watch: StallWatch) -> None:
        self._ask = ask
        self._watch = watch
        self._question: asyncio.Future[Progress] | None = None

    async def check(self) -> None:
        """Takes about `ANSWER_S` at most. Raises StageDied, or what the engine answers the question with."""
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask())
        await asyncio.wait({self._question}, timeout=ANSWER_S)
        self._watch.look(self._answer())

    def _answer(self) -> Progress | None:
        if self._question is None or not self._question.done():
            return None
        question, self._question = self._question, None
        return question.result()

    def close(self) -> None:
        """Asks no more."""
        if self._question is not None:
            self._question.cancel()
