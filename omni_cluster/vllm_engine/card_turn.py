"""Whose turn a card is: what a listener waits for in silence goes before what the card's other stages do.

Stages that share a card are processes of their own, and their kernels run beside each other. A first piece of sound is
thousands of small kernels, each of which waits for a place among those of the others; first tokens come at half their
pace beside a large step of sound. So each stage says what is waited for, in words of memory that the processes of a
host share, and the others leave the card to it as far as nobody falls silent.
"""

from __future__ import annotations

import enum
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

LEASE_S: Final = 0.1
"""What nobody says anew ends after this time: who said it may be dead."""
MOST_WAIT_S: Final = 0.06
"""A stage waits for so long at a time, and no longer than it has been at work before: at most half of its time."""
POLL_S: Final = 0.0003
_NAME = re.compile(r"[^A-Za-z0-9-]")


class Sign(enum.IntEnum):
    """What a stage tells the others of its card. The value is the place of its word."""

    FIRST_SOUND = 0
    """A stream's first sound is being made."""
    HASTE = 1
    """Sound is being made that a player needs soon."""
    FIRST_TOKENS = 2
    """The tokens of a stream's first sound are being made."""


class CardTurns:
    """What the stages of some cards tell each other. Without cards nobody tells anything, and nobody waits."""

    def __init__(
        self,
        cards: Sequence[str],
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`cards`: their names in CUDA_VISIBLE_DEVICES. `folder`: of the shared words, one for all stages of a host."""
        self._words = [_shared_words((folder or _own_folder()) / f"card-{_NAME.sub('_', card)}") for card in cards]
        self._clock, self._sleep = clock, sleep
        self._said = dict.fromkeys(Sign, 0)
        self._may_wait_s, self._looked_s = 0.0, clock()

    def tell(self, sign: Sign, is_so: bool) -> None:
        """Tells the other stages that it is so here, for `LEASE_S`, or that it no longer is."""
        until = int((self._clock() + LEASE_S) * 1e9) if is_so else 0
        for words in self._words:
            if is_so or words[sign] == self._said[sign]:  # what another process says is its own to end
                words[sign] = until
        self._said[sign] = until

    def wait(self) -> None:
        """Before a step: returns once nobody's first sound is being made, or after as long as this stage may wait."""
        if not self._words:
            return
        now_s = self._clock()
        self._may_wait_s = min(MOST_WAIT_S, self._may_wait_s + now_s - self._looked_s)
        while self._may_wait_s > 0 and self.is_told(Sign.FIRST_SOUND):
            self._sleep(POLL_S)
            now_s, before_s = self._clock(), now_s
            self._may_wait_s -= now_s - before_s
        self._looked_s = now_s

    def is_told(self, sign: Sign) -> bool:
        now = int(self._clock() * 1e9)
        return any(0 < words[sign] - now <= LEASE_S * 1e9 for words in self._words)


def visible_cards(count: int) -> list[str]:
    """The first `count` cards that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = [str(number) for number in range(count)] if named is None else [c for c in named.split(",") if c.strip()]
    return [card.strip() for card in cards[:count]]


def _own_folder() -> Path:
    """A folder that only this user can write to."""
    folder = Path(tempfile.gettempdir()) / f"omni-cluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it, or set TMPDIR to a folder of your own.")
    return folder


def _shared_words(path: Path) -> memoryview:
    """Times in nanoseconds, one a place, in memory that all processes share that open the file."""
    size = 8 * len(Sign)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(file, size)
        return memoryview(mmap.mmap(file, size)).cast("q")
    finally:
        os.close(file)
