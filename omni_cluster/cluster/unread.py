"""What clients have not read yet of their answers, in the process that sends them: Serve's HTTP proxy."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from ray import ObjectRef, ObjectRefGenerator
from ray.serve.request_router import PendingRequest, RunningReplica

from omni_cluster.cluster.serve_private import ReplicaQueueLengthInfo, ReplicaResult
from omni_cluster.server.message_parts import parts, payload_bytes

logger = logging.getLogger("ray.serve")

PIECE_BYTES: Final = 65_536
"""What the proxy is handed at once: it counts no bytes, and writes all that it has."""
PATIENCE_S: Final = 5.0
"""A client that has read something since then only lags: what is made may come faster than any client reads."""


class Unread:
    """The answers that this process sends: bounds what is unread of each, and of all together."""

    def __init__(self, most_bytes: int, most_total_bytes: int, patience_s: float = PATIENCE_S) -> None:
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._most_total_bytes = most_total_bytes
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self.size_bytes = 0

    def grow(self, answer: Answer, size_bytes: int) -> None:
        """Counts bytes that came. Ends the answer if too much of it is unread and nothing was read lately.

        Ends the largest, whether it is read or not, when all together are too much.
        """
        if answer.size_bytes > self._most_bytes and time.monotonic() - answer.read_at_s > self._patience_s:
            self._end(answer, "advanced.limits.max_unread_bytes", self._most_bytes)
            return
        self._answers.add(answer)
        self._add(answer, size_bytes)
        while self.size_bytes > self._most_total_bytes:
            largest = max(self._answers, key=lambda each: each.size_bytes)
            self._end(largest, "advanced.limits.max_unread_total_bytes", self._most_total_bytes)

    def shrink(self, answer: Answer, size_bytes: int) -> None:
        self._add(answer, -min(size_bytes, answer.size_bytes))

    def forget(self, answer: Answer) -> None:
        self.shrink(answer, answer.size_bytes)
        self._answers.discard(answer)

    def _add(self, answer: Answer, size_bytes: int) -> None:
        answer.size_bytes += size_bytes
        self.size_bytes += size_bytes

    def _end(self, answer: Answer, limit: str, most_bytes: int) -> None:
        logger.warning(
            "request %s: ended, its client left %d bytes of the answer unread, and %s is %d",
            answer.request_id,
            answer.size_bytes,
            limit,
            most_bytes,
        )
        answer.end()


class Answer(ReplicaResult):
    """An answer's ASGI messages: taken from the replica as they are made, handed to the proxy as its client reads.

    Serve's own result leaves them where Ray keeps objects, uncounted. The proxy asks for the next when it has written
    what it was given; that waits while the client does not read.
    """

    def __init__(self, result: ReplicaResult, unread: Unread, request_id: str) -> None:
        self._result = result
        self._unread = unread
        self.request_id = request_id
        self.size_bytes = 0
        self.read_at_s = time.monotonic()
        self._handed_bytes = 0
        self._pieces: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._taker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: BaseException | None = None

    async def __anext__(self) -> bytes:
        if self._taker is None:
            self._loop = asyncio.get_running_loop()
            self._taker = self._loop.create_task(self._take())
        self._unread.shrink(self, self._handed_bytes)
        self._handed_bytes = 0
        self.read_at_s = time.monotonic()
        while not self._pieces:
            if self._end is not None:
                self._unread.forget(self)
                raise self._end
            self._news.clear()
            await self._news.wait()
        piece = self._pieces.popleft()
        self._handed_bytes = len(piece)
        return piece

    async def _take(self) -> None:
        try:
            while self._end is None:
                made = list(pieces(await self._result.__anext__()))
                self._pieces.extend(made)
                self._news.set()
                self._unread.grow(self, sum(map(len, made)))
        except (Exception, asyncio.CancelledError) as error:  # the end too: the call for the next piece raises it
            self._end = self._end or error.with_traceback(None)  # whose frames would hold this answer
            self._news.set()

    def end(self) -> None:
        """For the replica as if the client had left; the proxy closes the connection once it can write again."""
        self._end = asyncio.CancelledError()
        self._pieces.clear()
        self._news.set()
        self.cancel()

    def cancel(self) -> None:
        self._unread.forget(self)
        self._result.cancel()
        if self._taker is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._taker.cancel)

    def __del__(self) -> None:
        self._unread.forget(self)

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo | None:
        return await self._result.get_rejection_response()

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self._result.add_done_callback(callback)

    def get(self, timeout_s: float | None) -> Any:
        return self._result.get(timeout_s)

    async def get_async(self) -> Any:
        return await self._result.get_async()

    def __next__(self) -> Any:
        return self._result.__next__()

    def to_object_ref(self) -> ObjectRef:
        return self._result.to_object_ref()

    async def to_object_ref_async(self) -> ObjectRef:
        return await self._result.to_object_ref_async()

    def to_object_ref_gen(self) -> ObjectRefGenerator:
        return self._result.to_object_ref_gen()


class CountedReplica(RunningReplica):
    """A replica whose requests under way are counted, and what is unread of their answers."""

    def __init__(self, replica_info: Any, unread: Unread) -> None:
        super().__init__(replica_info)
        self._unread = unread
        self._under_way: set[str] = set()

    @property
    def under_way(self) -> int:
        """Requests that this process expects to send, or sent, and that have not ended."""
        return len(self._under_way)

    def expect(self, pr: PendingRequest) -> None:
        """It is chosen for `pr`: Serve sends it some turns of its loop later, or to another, or not at all."""
        name = pr.metadata.internal_request_id
        self._under_way.add(name)
        pr.future.add_done_callback(partial(self._settle, name))

    def _settle(self, name: str, chosen: asyncio.Future[RunningReplica]) -> None:
        if chosen.cancelled() or chosen.result() is not self:
            self._under_way.discard(name)

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        name = pr.metadata.internal_request_id
        try:
            result = super().try_send_request(pr, with_rejection)
        except BaseException:
            self._under_way.discard(name)
            raise
        self._under_way.add(name)
        result.add_done_callback(lambda _: self._under_way.discard(name))
        is_answer = pr.metadata.is_http_request and pr.metadata.is_streaming
        return Answer(result, self._unread, pr.metadata.request_id) if is_answer else result


def pieces(item: bytes) -> Iterator[bytes]:
    """A pickled list of ASGI messages, as Serve sends them, in lists of about `PIECE_BYTES` at most."""
    if len(item) <= PIECE_BYTES:
        yield item
        return
    together: list[dict[str, Any]] = []
    size_bytes = 0
    for message in pickle.loads(item):
        for part in parts(message, PIECE_BYTES):
            together.append(part)
            size_bytes += payload_bytes(part)
            if size_bytes >= PIECE_BYTES:
                yield pickle.dumps(together)
                together, size_bytes = [], 0
    if together:
        yield pickle.dumps(together)
