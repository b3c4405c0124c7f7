"""The processes that read requests with media: a few that live long, each with one request at a time.

If a process ends, or takes longer than it may, its request is at fault: the request is refused, and the process is
replaced. It is replaced too when its client has left, and when it ends before it has read a request, which then goes to
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from omni_cluster.openai_api import decoder
from omni_cluster.openai_api.chat import ChatRequest
from omni_cluster.openai_api.decoder import (
    Answer,
    Form,
    Job,
    Kind,
    Opened,
    OpenedSound,
    Refused,
    Wanted,
    max_answer_bytes,
)
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import NO_DEFAULTS, ApiDefaults, ApiLimits
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.parcel import Parcel, ParcelError, packed, unpacked
from omni_cluster.openai_api.responses import ResponsesRequest
from omni_cluster.openai_api.transcription import TranscriptionRequest
from omni_cluster.types.errors import OmniError

T = TypeVar("T")
Fetch = Callable[[Sequence[MediaUrl]], Awaitable[Mapping[str, bytes]]]

_START_S: Final = 120.0
_PAUSE_S: Final = 1.0
"""Between two decoders that are started before a request needs them: whatever ends them may end the next one too."""
_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""The variables that a decoder gets: others may be secrets, and decoding cannot depend on them."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

logger = logging.getLogger(__name__)


class DecoderFailed(OmniError):
    """A decoder that does not start, or that something other than its request ended."""


@dataclass(frozen=True)
class DecoderLimits:
    """`memory_bytes` and `timeout_s`: of one request; `max_held_bytes`: see `Decoders`."""

    processes: int
    memory_bytes: int
    timeout_s: float
    max_held_bytes: int


class Decoders:
    """Up to `processes` decoders, each started when it is first needed, or before by `keep_one_ready`.

    As long as the media of requests that were decoded hold `max_held_bytes` or more, further ones wait. They are let go
    with the last array of a request.
    """

    def __init__(
        self,
        bounds: DecoderLimits,
        limits: ApiLimits,
        models: Sequence[str],
        voices: Collection[str],
        defaults: ApiDefaults = NO_DEFAULTS,
    ) -> None:
        self._bounds = bounds
        self._limits = limits
        self._models = list(models)
        self._voices = list(voices)
        self._defaults = defaults
        self._idle: list[_Decoder] = []
        self._room = asyncio.Semaphore(bounds.processes)
        self._has_none_ready = asyncio.Event()
        self._has_none_ready.set()
        self._held = _Held(bounds.max_held_bytes)
        # One for each process, to write its job and read its answer, and one that waits for those that end.
        self._threads = ThreadPoolExecutor(bounds.processes + 1, thread_name_prefix="decoders")
        self._is_closed = False

    async def open(self, body: bytes | bytearray, fetch: Fetch) -> ChatRequest:
        """The request, its media fetched by `fetch` and decoded. Raises BadRequest."""
        return (await self._opened(body, fetch, "chat")).chat

    async def open_response(self, body: bytes | bytearray, fetch: Fetch) -> ResponsesRequest:
        """The same of a body for `/v1/responses`."""
        opened = await self._opened(body, fetch, "responses")
        return ResponsesRequest(opened.chat, opened.repeated)

    async def _opened(self, body: bytes | bytearray, fetch: Fetch, kind: Kind) -> Opened:
        answer = await self._answer(self._job(body, kind=kind))
        if isinstance(answer, Wanted):
            fetched = {param: _array(data) for param, data in (await fetch(answer.urls)).items()}
            answer = await self._answer(self._job(body, fetched, kind=kind))
        if isinstance(answer, Opened):
            return answer
        raise _unreadable()

    async def open_form(self, body: bytes | bytearray, form: Form) -> TranscriptionRequest:
        """The request of a form, its sound decoded. Raises BadRequest."""
        answer = await self._answer(self._job(body, form=form))
        if isinstance(answer, OpenedSound):
            return answer.transcription
        raise _unreadable()

    async def keep_one_ready(self) -> None:
        """Starts a decoder now, and another whenever one has ended and none is idle, until it is cancelled.

        A request that comes while none is idle starts one itself. A decoder that does not start is logged.
        """
        while not self._is_closed:
            await self._has_none_ready.wait()
            self._has_none_ready.clear()
            await self._start_one_to_spare()
            await asyncio.sleep(_PAUSE_S)

    async def _start_one_to_spare(self) -> None:
        async with self._room:
            if self._idle:
                return
            try:
                self._rest(await self._started())
            except (DecoderFailed, OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
                logger.warning("no decoder is ready: %s", error)

    def close(self) -> None:
        """Ends all decoders. It is called in the event loop."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().end(self._threads)
        self._threads.shutdown(wait=False)

    def _rest(self, one: _Decoder) -> None:
        """Keeps the decoder for another request. If it ends meanwhile, it is removed."""
        if self._is_closed:
            self._end(one)
            return

        def ended() -> None:
            logger.warning("a decoder ended while it was idle")
            self._idle.remove(one)
            self._end(one)

        one.watch(ended)
        self._idle.append(one)

    def _idle_one(self) -> _Decoder | None:
        while self._idle:
            one = self._idle.pop()
            if one.runs():
                one.watch(None)
                return one
            self._end(one)
        return None

    def _job(
        self,
        body: bytes | bytearray,
        fetched: Mapping[str, np.ndarray] | None = None,
        form: Form | None = None,
        kind: Kind = "chat",
    ) -> Job:
        given = _array(body), dict(fetched or {})
        return Job(*given, self._models, self._voices, self._limits, self._defaults, form, kind)

    async def _answer(self, job: Job) -> Opened | OpenedSound | Wanted:
        async with self._room:
            await self._held.room()
            answer = await self._asked(job)
        if isinstance(answer, Refused):
            raise BadRequest(answer.message, param=answer.param, code=answer.code, status=answer.status)
        return answer

    async def _asked(self, job: Job) -> Answer:
        """A decoder's answer to a job. Ends a decoder that does not answer."""
        while one := self._idle_one():
            with contextlib.suppress(ConnectionError):  # it had ended before it read the job
                return await self._answered(one, job)
        try:
            return await self._answered(await self._started(), job)
        except ConnectionError:
            raise DecoderFailed("a process that decodes media ended before it had read a request.") from None

    async def _answered(self, one: _Decoder, job: Job) -> Answer:
        """Raises ConnectionError for a decoder that ended without having read the job."""
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                answer, is_last = await self._exchange(one, job)
        except TimeoutError:
            self._end(one)
            raise self._too_slow() from None
        except (ParcelError, EOFError) as error:
            logger.warning("a decoder ended with the request that it had: %s", error)
            self._end(one)
            raise _unreadable() from None
        except BaseException:  # the client has left, or it ended without having read the job
            self._end(one)
            raise
        if is_last:
            self._end(one)
        else:
            self._rest(one)
        return answer

    def _end(self, one: _Decoder) -> None:
        one.end(self._threads)
        self._has_none_ready.set()

    async def _exchange(self, one: _Decoder, job: Job) -> tuple[Answer, bool]:
        parcel = await self._in_thread(lambda: packed(job, job.max_bytes))
        one.send(parcel)
        word, answer = await one.receive()
        if answer is None:
            raise ParcelError(f"the word {word!r} without an answer")
        max_bytes = max_answer_bytes(self._limits)
        counts = self._held.counter()
        opened = await self._in_thread(lambda: unpacked(answer, Answer, max_bytes, counts))
        return opened, word == decoder.LAST

    async def _started(self) -> _Decoder:
        max_parcel_bytes = Job(_array(b""), {}, [], [], self._limits).max_bytes
        one = await self._made(lambda: _Decoder(self._bounds.memory_bytes, max_parcel_bytes))
        try:
            async with asyncio.timeout(_START_S):
                await one.receive()
        except (TimeoutError, EOFError, ConnectionError):
            one.end(self._threads)
            raise DecoderFailed(
                "a process that decodes media does not start; the server's log has the cause."
            ) from None
        except BaseException:
            one.end(self._threads)
            raise
        return one

    async def _made(self, make: Callable[[], _Decoder]) -> _Decoder:
        """A decoder that is made in a thread; it is ended if its request is gone."""
        making = asyncio.ensure_future(self._in_thread(make))

        def end(made: asyncio.Future[_Decoder]) -> None:
            if not made.cancelled() and made.exception() is None:
                made.result().end(self._threads)

        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(end)
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _too_slow(self) -> BadRequest:
        return BadRequest(
            f"The request's media take longer than {self._bounds.timeout_s:g} s to decode, which is the most they may.",
            code="media_too_slow",
            status=413,
        )


class _Held:
    """Bytes of decoded media that are in use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def room(self) -> None:
        await self._has_room.wait()

    def counter(self) -> Callable[[int], None]:
        """`_add` for other threads."""
        loop = asyncio.get_running_loop()

        def count(more_bytes: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every request
                loop.call_soon_threadsafe(self._add, more_bytes)

        return count

    def _add(self, more_bytes: int) -> None:
        self._bytes += more_bytes
        if self._bytes < self._max_bytes:
            self._has_room.set()
        else:
            self._has_room.clear()


class _Decoder:
    """One process, and the link to it; made in a thread, since a process takes milliseconds to begin."""

    def __init__(self, memory_bytes: int, max_parcel_bytes: int) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                _command(theirs.fileno(), memory_bytes, max_parcel_bytes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )

    def send(self, parcel: Parcel) -> None:
        try:
            socket.send_fds(self._link, [decoder.JOB], [parcel.descriptor])
        finally:
            parcel.close()

    async def receive(self) -> tuple[bytes, Parcel | None]:
        """Its next word, and what came with it. Raises EOFError when it has ended."""
        loop = asyncio.get_running_loop()
        spoke: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._link.fileno(), _settle, spoke)
        try:
            await spoke
        finally:
            loop.remove_reader(self._link.fileno())
        word, descriptors, _, _ = socket.recv_fds(self._link, decoder.MAX_WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not word:
            raise EOFError("it ended without an answer")
        return word, Parcel(descriptors[0]) if descriptors else None

    def watch(self, ended: Callable[[], None] | None) -> None:
        """Calls `ended` when the process ends while it has nothing to do; None: no more."""
        loop = asyncio.get_running_loop()
        if ended is None:
            loop.remove_reader(self._link.fileno())
        else:
            loop.add_reader(self._link.fileno(), ended)

    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, threads: ThreadPoolExecutor) -> None:
        self.watch(None)
        self._process.kill()
        self._link.close()
        with contextlib.suppress(RuntimeError):  # the threads are closed, and so is the server
            threads.submit(self._process.wait)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _command(descriptor: int, memory_bytes: int, max_parcel_bytes: int) -> list[str]:
    # -P: modules come from where this process has them, and not from the folder that it happens to be in.
    figures = [str(descriptor), str(memory_bytes), str(max_parcel_bytes)]
    return [sys.executable, "-P", "-m", decoder.__name__, *figures]


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return passed_on | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _unreadable() -> BadRequest:
    return BadRequest(
        "The request's media ended the process that decodes them; send other files.", code="media_unreadable"
    )


def _array(data: bytes | bytearray) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
