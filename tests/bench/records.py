"""Records of requests that never were."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from omni_cluster.api_client import ServedModel
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import Machine
from omni_cluster.bench.record import AudioArrival, RequestRecord, Said
from omni_cluster.bench.result import Cell, Result
from omni_cluster.bench.stats import cell_of

SECOND = 24_000
CODES_PER_S = 50.0
STAGES = {"text": "words", "codes": "codes", "sound": "wave"}
MODEL = ServedModel("m", SECOND, CODES_PER_S, STAGES)


def record(number: int = 0, slower: float = 1.0, error: str | None = None) -> RequestRecord:
    """Text at 0.1 and 0.2 s, two seconds of sound in two chunks with a gap, 4 s in all, times `slower`.

    Half of the first chunk is silent.
    """
    if error is not None:
        return RequestRecord(number, 9.0 * slower, error=error, sample_rate_hz=SECOND)
    return RequestRecord(
        number=number,
        total_s=4.0 * slower,
        text_s=(0.1 * slower, 0.2 * slower),
        audio=(AudioArrival(1.0 * slower, SECOND), AudioArrival(3.0 * slower, SECOND)),
        stages={
            "first": {"first_s": 0.1, "last_s": 0.5 * slower, "work_s": 0.5 * slower - 0.1},
            "second": {"wait_s": 1.0},
        },
        prompt_tokens=10,
        text_tokens=2,
        codec_tokens=100,
        audible_at=SECOND // 2,
        sample_rate_hz=SECOND,
    )


def gapless(number: int) -> RequestRecord:
    """The same, but its second chunk comes with its first."""
    whole = record(number)
    return dataclasses.replace(whole, audio=tuple(dataclasses.replace(chunk, at_s=1.0) for chunk in whole.audio))


def result(cells: Sequence[Cell] = (), *, target: str = "offline", load: Load | None = None) -> Result:
    machine = Machine("here", "Linux", 2, (), None, "3.11", {"vllm": "0.30.0"})
    return Result("2026-01-02T03:04:05+00:00", "omni-cluster bench", target, "m", machine, load or Load(), tuple(cells))


def two_cells(slower: float = 1.0) -> tuple[Cell, Cell]:
    closed = [record(n, slower) for n in range(4)]
    return cell_of("closed", 2, closed, 8.0 * slower), cell_of("open", 0.5, [*closed, record(4, error="no.")], 10.0)


class Server:
    """What `ask` is in a test: requests end when the test says so, and it knows how many there were at once."""

    def __init__(self, holds: bool = False) -> None:
        self.asked: list[int] = []
        self.said: list[tuple[Said, ...]] = []
        self.at_once: list[int] = []
        self.sent_s: list[float] = []
        self.may_end = asyncio.Event()
        self._running = 0
        if not holds:
            self.may_end.set()

    async def ask(self, number: int, said: Sequence[Said] = ()) -> RequestRecord:
        self._running += 1
        self.asked.append(number)
        self.said.append(tuple(said))
        self.at_once.append(self._running)
        self.sent_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        await self.may_end.wait()
        self._running -= 1
        return record(number)


class Silent(Server):
    """A server whose answers are whole at once and without sound: the next turn is due after the pause."""

    async def ask(self, number: int, said: Sequence[Said] = ()) -> RequestRecord:
        await super().ask(number, said)
        return RequestRecord(number, 0.0, earlier_turns=len(said), reply=f"reply {number}", sample_rate_hz=SECOND)
