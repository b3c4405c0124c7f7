"""`omni-cluster bench --realtime`: clients that speak, wait for the answer's first sound, and interrupt it."""

from __future__ import annotations

import asyncio
import base64
import datetime
import itertools
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar

import av
import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.machine import Machine, this_machine
from omni_cluster.bench.result import FILE_NAME, Percentiles, make_folder
from omni_cluster.bench.stats import percentiles
from omni_cluster.bench.table import shown, wide_console

PIECE_S: Final = 0.04
"""Of sound that goes to the server at once."""
LISTENS_S: Final = 1.0
"""From an answer's first sound until the client speaks again, which interrupts it."""
SILENCE_MS: Final = 500
"""After which the server ends a turn: the protocol's default."""
MOST_TOKENS: Final = 64
"""Of an answer's text: random weights end none by themselves."""
SESSION: Final = {
    "type": "realtime",
    "max_output_tokens": MOST_TOKENS,
    "audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": SILENCE_MS}}},
}
MOST_EVENT_BYTES: Final = 16 << 20

Samples = npt.NDArray[np.int16]
Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class RealtimeOptions:
    """`concurrency`: conversations at once, a cell each; `idle`: sessions that are open beside them and say nothing."""

    url: str
    out: Path
    command: str
    concurrency: tuple[int, ...] = (1, 16)
    turns: int = 4
    idle: int = 0
    timeout_s: float = 600.0


@dataclass(slots=True)
class SpokenTurn:
    """Times in seconds; None where the event did not come.

    `first_sound_s`: from the end of the client's speech to the answer's first sound. `noticed_s`: from the beginning of
    the speech that interrupts it to `speech_started`. `silent_s`: from there to the last sound of this answer, 0 where
    none came after it.
    """

    first_sound_s: float | None = None
    noticed_s: float | None = None
    silent_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RealtimeCell:
    """What a number of conversations came to. `turns` have an answer, or an error."""

    conversations: int
    turns: int
    errors: int
    wall_s: float
    figures: dict[str, Percentiles] = field(default_factory=dict)
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class RealtimeResult:
    """A whole run."""

    date: str
    command: str
    target: str
    machine: Machine
    silence_ms: int
    idle: int
    cells: tuple[RealtimeCell, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """Speech at the rate that sessions take by default."""

    samples: Samples
    rate_hz: int

    def pieces(self) -> list[Samples]:
        """Of `PIECE_S`; the last is what remains."""
        size = len(self.silence)
        return [self.samples[start : start + size] for start in range(0, len(self.samples), size)]

    @property
    def silence(self) -> Samples:
        """A piece of it."""
        return np.zeros(int(PIECE_S * self.rate_hz), np.int16)


def recording() -> Recording:
    """Two sentences of a speech synthesizer with a pause between them."""
    with resources.files("omni_cluster.bench").joinpath("speech.flac").open("rb") as data, av.open(data) as file:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
        return Recording(samples, file.streams.audio[0].rate)


def run_realtime(options: RealtimeOptions) -> None:
    """Runs all cells, writes result.json after each, prints the table.

    Raises BenchError where no turn of a cell succeeded, or the server opens no session.
    """
    make_folder(options.out)
    result = asyncio.run(_measured(options))
    console = wide_console()
    console.print(table(result))
    console.print(f"written: {options.out / FILE_NAME}", markup=False, soft_wrap=True)
    for cell in result.cells:
        if cell.errors == cell.turns:
            raise BenchError(f"no turn of {cell.conversations} conversations succeeded: {cell.first_error}")


async def _measured(options: RealtimeOptions) -> RealtimeResult:
    speech, result = recording(), _result(options, ())
    async with AsyncExitStack() as idle:
        try:
            for _ in range(options.idle):
                await idle.enter_async_context(session(options))
        except (OSError, WebSocketException) as error:
            raise BenchError(f"{options.url} opened no session ({error}); name a server by --url.") from None
        for conversations in options.concurrency:
            result = _result(options, (*result.cells, await _cell(options, conversations, speech)))
            written = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
            (options.out / FILE_NAME).write_bytes(written)
    return result


def _result(options: RealtimeOptions, cells: tuple[RealtimeCell, ...]) -> RealtimeResult:
    role = f"the client; what serves {options.url} may be another machine with other versions"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RealtimeResult(now, options.command, options.url, this_machine(role), SILENCE_MS, options.idle, cells)


async def _cell(options: RealtimeOptions, conversations: int, speech: Recording) -> RealtimeCell:
    """Conversations begin one after another within the time of a turn's speech."""
    loop = asyncio.get_running_loop()
    started_s, stagger_s = loop.time(), len(speech.samples) / speech.rate_hz / conversations

    async def one(number: int) -> list[SpokenTurn]:
        await asyncio.sleep(number * stagger_s)
        return await converse(options, speech)

    turns = list(itertools.chain.from_iterable(await asyncio.gather(*map(one, range(conversations)))))
    errors = [turn.error for turn in turns if turn.error is not None]
    names = ("first_sound_s", "noticed_s", "silent_s")
    values = {name: [value for turn in turns if (value := getattr(turn, name)) is not None] for name in names}
    figures = {name: percentiles(each) for name, each in values.items() if each}
    wall_s = loop.time() - started_s
    return RealtimeCell(conversations, len(turns), len(errors), wall_s, figures, errors[0] if errors else None)


async def converse(options: RealtimeOptions, speech: Recording) -> list[SpokenTurn]:
    """The turns of one client. An error ends its conversation."""
    turns = [SpokenTurn()]
    try:
        async with asyncio.timeout(options.timeout_s), session(options) as socket:
            caller = Caller(socket)
            talk = caller.take_turns(turns, options.turns, speech)
            await until_one_ends(talk, caller.send_sound(speech.silence), caller.read())
    except TimeoutError:
        turns[-1].error = f"the conversation took longer than {options.timeout_s:g} s."
    except (OSError, WebSocketException, BenchError) as error:
        turns[-1].error = str(error) or type(error).__name__
    return turns


async def until_one_ends(talk: Coroutine[Any, Any, Said], *beside: Coroutine[Any, Any, None]) -> Said:
    """What `talk` comes to. Raises what ended one of them before, and BenchError where one just ended."""
    tasks = [asyncio.ensure_future(each) for each in beside]
    talking = asyncio.ensure_future(talk)
    try:
        done, _ = await asyncio.wait([talking, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (talking, *tasks):
            task.cancel()
        await asyncio.gather(talking, *tasks, return_exceptions=True)
    for ended in done:
        ended.result()
    if talking not in done:
        raise BenchError("the server closed the session.")
    return talking.result()


class TurnClock:
    """Times a turn, and what it interrupts, by what the client does and is sent: seconds of one clock."""

    def __init__(self) -> None:
        self._turn = SpokenTurn()
        self._before: SpokenTurn | None = None
        self._answer_id: str | None = None
        self._interrupted_id: str | None = None
        self._spoke_s = 0.0
        self._ended_s: float | None = None
        self._noticed_s: float | None = None

    def begin(self, turn: SpokenTurn, before: SpokenTurn | None) -> None:
        """`before`: the turn whose answer this one interrupts."""
        self._turn, self._before = turn, before
        self._interrupted_id, self._answer_id = self._answer_id, None
        self._ended_s = self._noticed_s = None

    def speak(self, now_s: float) -> None:
        self._spoke_s = now_s

    def end(self, now_s: float) -> None:
        """All of the speech is sent."""
        self._ended_s = now_s

    def notice(self, now_s: float) -> None:
        """The server says that the client speaks; where it takes a turn for two, the first time counts."""
        if self._noticed_s is None:
            self._noticed_s = now_s
            if self._before is not None:
                self._before.noticed_s, self._before.silent_s = now_s - self._spoke_s, 0.0

    def hear(self, response_id: str, now_s: float) -> bool:
        """Takes some sound. Returns whether it is the first of the answer to the turn."""
        if response_id == self._interrupted_id:
            if self._before is not None and self._noticed_s is not None:
                self._before.silent_s = now_s - self._noticed_s
            return False
        if self._ended_s is None or self._answer_id is not None:
            return False
        self._turn.first_sound_s, self._answer_id = now_s - self._ended_s, response_id
        return True


class Caller:
    """A client with a microphone that is always open."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._says: list[Samples] = []
        self._is_speaking = False
        self._has_sounded = asyncio.Event()
        self._clock = TurnClock()

    async def take_turns(self, turns: list[SpokenTurn], most: int, speech: Recording) -> None:
        """Each interrupts the answer to the one before it."""
        await self._send("session.update", session=SESSION)
        await self._take_turn(turns[-1], None, speech)
        while len(turns) < most:
            before = turns[-1]
            turns.append(SpokenTurn())
            await self._take_turn(turns[-1], before, speech)

    async def _take_turn(self, turn: SpokenTurn, before: SpokenTurn | None, speech: Recording) -> None:
        """Speaks, waits for the answer's first sound, and listens to some of it."""
        self._clock.begin(turn, before)
        self._has_sounded.clear()
        self._says = speech.pieces()
        await self._has_sounded.wait()
        await asyncio.sleep(LISTENS_S)

    async def send_sound(self, silence: Samples) -> None:
        """In real time, for as long as the session is open: speech, else silence."""
        due_s = self._loop.time()
        while True:
            if self._says and not self._is_speaking:
                self._is_speaking = True
                self._clock.speak(self._loop.time())
            piece = self._says.pop(0) if self._says else silence
            await self._send("input_audio_buffer.append", audio=base64.b64encode(piece.tobytes()).decode())
            if self._is_speaking and not self._says:
                self._is_speaking = False
                self._clock.end(self._loop.time())
            due_s += PIECE_S
            await asyncio.sleep(due_s - self._loop.time())

    async def read(self) -> None:
        """Raises BenchError for an error event."""
        async for text in self._socket:
            event = json.loads(text)
            if event["type"] == "error":
                raise BenchError(event["error"]["message"])
            if event["type"] == "input_audio_buffer.speech_started":
                self._clock.notice(self._loop.time())
            elif event["type"] == "response.output_audio.delta" and self._clock.hear(
                event["response_id"], self._loop.time()
            ):
                self._has_sounded.set()

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))


@asynccontextmanager
async def session(options: RealtimeOptions) -> AsyncIterator[ClientConnection]:
    """A session that is open. Raises BenchError where the server opens none."""
    address = options.url.replace("http", "ws", 1).rstrip("/") + "/v1/realtime"
    async with connect(address, max_size=MOST_EVENT_BYTES, open_timeout=options.timeout_s) as socket:
        first = json.loads(await socket.recv())
        if first["type"] != "session.created":
            raise BenchError(f"the server opens no session: {first.get('error', {}).get('message', first['type'])}")
        yield socket


def table(result: RealtimeResult) -> Table:
    """A line a cell."""
    made = Table("conversations", title="conversations by voice, seconds: p50 / p95 / p99")
    columns = ("turns", "errors", "speech's end to first sound", "interruption noticed", "then silent after")
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    for cell in result.cells:
        times = [shown(cell.figures.get(name), middle="p95") for name in ("first_sound_s", "noticed_s", "silent_s")]
        made.add_row(str(cell.conversations), str(cell.turns), str(cell.errors), *times)
    return made
