"""What a soak says while it runs, so that one which is cut off has told what it saw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.chaos.breaker import Break
from tests.chaos.clients import WRONG, Outcome

TOLD_EVERY_S = 15.0


class Progress:
    """Tells of outcomes and breaks that came since it last looked; both lists grow at their end."""

    def __init__(self, outcomes: Sequence[Outcome], breaks: Sequence[Break], say: Callable[[str], None]) -> None:
        self._outcomes, self._breaks, self._say = outcomes, breaks, say
        self._told_outcomes = self._told_breaks = 0
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            self.tell()

    def tell(self) -> None:
        for line in self._news():
            self._say(f"{time.monotonic() - self._began_s:.0f} s: {line}")

    def _news(self) -> Iterator[str]:
        outcomes, breaks = self._outcomes[self._told_outcomes :], self._breaks[self._told_breaks :]
        self._told_outcomes += len(outcomes)
        self._told_breaks += len(breaks)
        yield from (f"{each.way}: {each.target}" for each in breaks)
        yield from (f"{each.how}: {each.case}: {each.why}" for each in outcomes if each.how in WRONG)
        counts = Counter(each.how for each in self._outcomes)
        yield ", ".join(f"{count} {how}" for how, count in counts.most_common()) or "no request has ended"
