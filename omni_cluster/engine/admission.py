"""Admission by slack: whether one more stream would make a player stand still for longer than is accepted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.round_cost import URGENT_S, RoundCost

EARLY_PIECES = 3
"""Pieces of a stream that follow its first one before it has sound for several rounds."""
CUSHION_S = 0.15
"""What its player has left when a round begins: the sound of a first piece, less its way to the client."""
EXPECTED_S = 5.0
"""A stream that was admitted and does not come within this time has ended before it began."""


def expected_stall_s(cost: RoundCost, urgent: int) -> float:
    """How long each of so many players stands still, all in all, if each gets a piece in every round.

    Both constants are fitted to `benchmarks/code2wav_simulation.py`, at 9 to 48 urgent players.
    """
    return EARLY_PIECES * max(0.0, cost.seconds(urgent) - CUSHION_S)


class Admission:
    """The players of one diffusion stage, and who may join them."""

    def __init__(self, max_stall_s: float | None, cost: RoundCost, clock: Callable[[], float]) -> None:
        """`max_stall_s`: None lets everybody in."""
        self._max_stall_s, self._cost, self._clock = max_stall_s, cost, clock
        self._players: dict[str, Playback] = {}
        self._expected: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def admit(self, stream: str) -> bool:
        """Whether the stream may begin; waits for up to `max_stall_s` until it may, in turn."""
        if self._max_stall_s is None:
            return True
        try:
            async with asyncio.timeout(self._max_stall_s), self._turn:
                while not self._has_room(self._max_stall_s):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        self._expected[stream] = self._clock() + EXPECTED_S
        return True

    def _has_room(self, max_stall_s: float) -> bool:
        """A stream that would be alone always has: nobody else would make it stand still."""
        urgent = self.urgent()
        return not urgent or expected_stall_s(self._cost, urgent + 1) <= max_stall_s

    def slack_use(self) -> float:
        """Urgent players, as a part of those of whom each could get a piece before its cushion is used up."""
        return self.urgent() / self._cost.streams_within(CUSHION_S)

    def urgent(self) -> int:
        """Players that have less than `URGENT_S` of sound, those whose first sound is still made among them."""
        now_s = self._clock()
        self._expected = {stream: until_s for stream, until_s in self._expected.items() if until_s > now_s}
        return len(self._expected) + sum(each.left_s(now_s) < URGENT_S for each in self._players.values())

    @contextlib.contextmanager
    def player(self, stream: str) -> Iterator[Playback]:
        """The player of a stream that begins now, until all its sound is made."""
        self._expected.pop(stream, None)
        playback = self._players[stream] = Playback(on_delivery=self._changed.set)
        try:
            yield playback
        finally:
            del self._players[stream]
            self._changed.set()
