"""The log of what a stage makes of a request: kept until the request ends, read from any position, by any reader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable

from omni_cluster.engine.memory_budget import MemoryBudget
from omni_cluster.types.errors import OmniError, RequestGone
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import LARGE_BYTES, Rows


class OutputLogFull(OmniError):
    """A request made more than its log may hold."""


class OutputLogUnknown(RequestGone):
    """No output log of that request is open here: it has ended, or was made by another replica."""


class OutputLog:
    """An append-only log of one request's chunks with any number of readers, each from any chunk on.

    Bounded by `max_bytes` of tensors, arrays and pictures; text, token ids and codes by the request's own limits.
    `on_whole` is called once the stage has made all that it will: the last chunk is here, or there will be none.
    """

    def __init__(
        self,
        request_id: str,
        max_bytes: int,
        budget: MemoryBudget | None = None,
        on_whole: Callable[[], None] = lambda: None,
    ) -> None:
        self._request_id = request_id
        self._max_bytes = max_bytes
        self._budget = budget or MemoryBudget()
        self._chunks: list[StageChunk] = []
        self.num_bytes = 0
        self._closed = False
        self._is_whole = False
        self._is_let_go = False
        self._on_whole = on_whole
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._is_abandoned = asyncio.Event()
        self._has_reader = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def error(self) -> BaseException | None:
        """The error that ended the stage; readers get it after all chunks."""
        return self._error

    def put(self, chunk: StageChunk) -> None:
        """Appends a chunk. Raises OutputLogFull, and keeps what it had, if the chunk does not fit."""
        num_bytes = chunk_bytes(chunk)
        if self.num_bytes + num_bytes > self._max_bytes:
            raise OutputLogFull(
                f"request {self._request_id}: its output would take {self.num_bytes + num_bytes} bytes, more than "
                f"advanced.limits.outbox_max_bytes = {self._max_bytes}; raise that limit or shorten the prompt."
            )
        self.num_bytes += num_bytes
        self._budget.hold(num_bytes)
        self._chunks.append(chunk)
        if chunk.finish_reason is not None:
            self._note_whole()
        self._wake()

    def close(self) -> None:
        """No more chunks will come; readers end once they have read all."""
        self._closed = True
        self._note_whole()
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The stage broke: readers get what there is, then the error."""
        self._error = error
        self.close()

    def let_go(self) -> None:
        """Removes the log from the table; open readers may finish."""
        self._budget.release(self.num_bytes)
        self._budget = MemoryBudget()
        self._is_let_go = True

    def abandon(self) -> None:
        """No reader is left: the request has its whole answer, or a reader disappeared without closing."""
        self._is_abandoned.set()

    async def until_given_up(self, first_reader_s: float) -> None:
        """Returns once the log is abandoned, or no reader has come within `first_reader_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(first_reader_s):
                await self._has_reader.wait()
        if self._has_reader.is_set():
            await self._is_abandoned.wait()

    async def earlier_rows(self, first: int) -> AsyncGenerator[Rows, None]:
        """Rows from position `first` on that the first chunk with rows left out, which has come. See `Rows`.

        Raises OutputLogUnknown, also between two parts, once the request has ended: the rows have no reader any more.
        """
        rows = next((chunk.rows for chunk in self._chunks if chunk.rows is not None), None)
        if rows is None or rows.earlier is None:
            raise OutputLogUnknown(f"request {self._request_id}: it left no hidden states out here.")
        async with contextlib.aclosing(rows.earlier(first)) as parts:
            async for part in parts:
                yield part
                if self._is_let_go:
                    raise OutputLogUnknown(
                        f"request {self._request_id} ended before its earlier hidden states were sent."
                    )

    def chunk(self, number: int) -> StageChunk:
        """Returns a chunk, which must be there already."""
        return self._chunks[number]

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever something was put, and at the end. It must not raise."""
        self._listeners.append(listener)
        self._has_reader.set()

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    def waiting(self, first: int, max_item_bytes: int | None = None) -> tuple[StageChunk, int] | None:
        """Joins the chunks from number `first` on. Returns the joined chunk and the next number; None if there is none.

        Joins chunks up to `max_item_bytes`, but no large ones; a single chunk is never cut.
        """
        if first >= len(self._chunks):
            return None
        last = self._item_end(first, max_item_bytes)
        return StageChunk.joined(self._chunks[first:last]), last

    async def read(self, first: int = 0) -> AsyncGenerator[StageChunk, None]:
        """Yields chunks from number `first` on; each item joins all that were put since the item before."""
        self._has_reader.set()
        while await self._wait_for(first):
            first, begin = len(self._chunks), first
            yield StageChunk.joined(self._chunks[begin:first])

    async def _wait_for(self, number: int) -> bool:
        """Whether chunk `number` came; raises the stage's error when it will not."""
        while number >= len(self._chunks) and not self._closed:
            await self._changed.wait()
        if number < len(self._chunks):
            return True
        if self._error is not None:
            raise self._error
        return False

    def _item_end(self, first: int, max_item_bytes: int | None) -> int:
        if max_item_bytes is None:
            return len(self._chunks)
        last, num_bytes = first + 1, chunk_bytes(self._chunks[first])
        while last < len(self._chunks):
            following = chunk_bytes(self._chunks[last])
            if num_bytes + following > max_item_bytes or max(num_bytes, following) >= LARGE_BYTES:
                break
            num_bytes += following
            last += 1
        return last

    def _note_whole(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            self._on_whole()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()


def chunk_bytes(chunk: StageChunk, *, with_rows: bool = True) -> int:
    """Bytes of the chunk's arrays and pictures and, unless they are not to be counted, of its tensors."""
    num_bytes = sum(len(image.png) for image in chunk.images)
    num_bytes += 0 if chunk.audio is None else chunk.audio.samples.nbytes
    if chunk.rows is not None and with_rows:
        positions = chunk.rows.positions
        num_bytes += chunk.rows.raw.nbytes + (0 if positions is None else positions.nbytes)
    return num_bytes


class OutputLogs:
    """The open logs of one stage replica."""

    def __init__(self, max_bytes: int, max_total_bytes: float = math.inf) -> None:
        self._max_bytes = max_bytes
        self.budget = MemoryBudget(max_total_bytes)
        self._open: dict[str, OutputLog] = {}
        self.unfinished = 0
        """Requests that the stage still works on: those that wait for its engine, or for rows, included."""
        self._opened = asyncio.Event()

    def open(self, request_id: str) -> OutputLog:
        log = self._open[request_id] = OutputLog(request_id, self._max_bytes, self.budget, self._count_whole)
        self.unfinished += 1
        self._opened.set()
        self._opened = asyncio.Event()
        return log

    async def when_open(self, request_id: str, patience_s: float) -> OutputLog:
        """As `get`, but waits for a request that comes later. Raises OutputLogUnknown if it does not come in time."""
        ends_s = time.monotonic() + patience_s
        while request_id not in self._open and (left_s := ends_s - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._opened.wait(), left_s)
        return self.get(request_id)

    def get(self, request_id: str) -> OutputLog:
        """Raises OutputLogUnknown when the request has ended or was never here."""
        if request_id not in self._open:
            raise OutputLogUnknown(f"request {request_id}: no output log is open here; it has ended, or never came.")
        return self._open[request_id]

    def aside(self, request_id: str) -> OutputLog:
        """A private log for what one reader asked for; it counts toward the budget."""
        return OutputLog(request_id, self._max_bytes, self.budget)

    def abandon(self, request_id: str) -> None:
        """See `OutputLog.abandon`; a request that has ended stays as it is."""
        if (log := self._open.get(request_id)) is not None:
            log.abandon()

    def remove(self, request_id: str) -> None:
        """Ends the request here. Readers that are left get OutputLogUnknown, unless the log was closed before."""
        log = self._open.pop(request_id, None)
        if log is None:
            return
        log.let_go()
        if not log.closed:
            log.fail(OutputLogUnknown(f"request {request_id} ended before all of it was made."))

    def _count_whole(self) -> None:
        self.unfinished -= 1

    def __len__(self) -> int:
        return len(self._open)
