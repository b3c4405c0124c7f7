"""What a client leaves unread is counted, handed on in small pieces, and ended above its bounds."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from ray.serve._private.replica_result import ReplicaResult

from omni_cluster.cluster.unread import PIECE_BYTES, Answer, Unread, pieces

MIB = 1_048_576


def message(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Made(ReplicaResult):
    """A replica's answer: so many items, and then the end, or none."""

    def __init__(self, items: int, *, item_bytes: int = 1024, ends: bool = True) -> None:
        self._left, self._item_bytes, self._ends, self.is_cancelled = items, item_bytes, ends, False

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        if self._left:
            self._left -= 1
            return pickle.dumps([message(b"x" * self._item_bytes)])
        if self._ends:
            raise StopAsyncIteration
        await asyncio.Event().wait()
        raise AssertionError

    def cancel(self) -> None:
        self.is_cancelled = True

    def add_done_callback(self, callback: Callable[..., Any]) -> None: ...
    def get(self, timeout_s: float | None) -> Any: ...
    async def get_async(self) -> Any: ...
    def __next__(self) -> Any: ...
    def to_object_ref(self) -> Any: ...
    async def to_object_ref_async(self) -> Any: ...
    def to_object_ref_gen(self) -> Any: ...
    async def get_rejection_response(self) -> Any: ...


async def taken(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_pieces_are_small_and_joined_are_what_was_sent() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
    large = bytes(range(256)) * 1024
    sent = [start, message(b"small"), message(large), message(large, more=False)]
    lists = [pickle.loads(piece) for piece in pieces(pickle.dumps(sent))]
    assert lists[0][0] == start
    bodies = [part for each in lists for part in each if part is not start and "body" in part]
    assert b"".join(part["body"] for part in bodies) == b"small" + large + large
    assert [part["more_body"] for part in bodies] == [True] * (len(bodies) - 1) + [False]
    assert max(sum(len(part.get("body", b"")) for part in each) for each in lists) <= 2 * PIECE_BYTES
    as_it_is = pickle.dumps([start])
    assert list(pieces(as_it_is)) == [as_it_is]


def test_messages_of_a_websocket_are_handed_on_whole_and_in_small_pieces() -> None:
    half = PIECE_BYTES // 2
    sent = [{"type": "websocket.send", "bytes": bytes(half)}, {"type": "websocket.send", "text": "a" * half}] * 4
    lists = [pickle.loads(piece) for piece in pieces(pickle.dumps(sent))]
    assert lists == [sent[:2]] * 4


async def test_a_client_that_reads_gets_all_and_nothing_stays_counted() -> None:
    unread, made = Unread(MIB, MIB), Made(200)
    answer = Answer(made, unread, "one")
    count = 0
    with pytest.raises(StopAsyncIteration):
        while await answer.__anext__():
            count += 1
    assert count == 200 and unread.size_bytes == 0 and not made.is_cancelled


async def test_a_client_that_does_not_read_is_ended_at_its_bound() -> None:
    unread, made = Unread(64 * 1024, MIB, patience_s=0), Made(10_000)
    answer = Answer(made, unread, "one")
    await answer.__anext__()
    await taken(lambda: made.is_cancelled)
    assert unread.size_bytes == 0
    with pytest.raises(asyncio.CancelledError):
        await answer.__anext__()


async def test_a_client_that_lags_but_reads_is_not_ended() -> None:
    unread, made = Unread(64 * 1024, MIB, patience_s=60), Made(300)
    answer = Answer(made, unread, "one")
    await answer.__anext__()
    await taken(lambda: answer.size_bytes > 300 * 1024)
    assert not made.is_cancelled
    with pytest.raises(StopAsyncIteration):
        while await answer.__anext__():
            pass
    assert unread.size_bytes == 0


async def test_what_comes_at_once_may_be_larger_than_the_bound() -> None:
    unread, made = Unread(64 * 1024, MIB, patience_s=0), Made(3, item_bytes=200 * 1024)
    answer = Answer(made, unread, "one")
    first = await answer.__anext__()
    assert len(first) < 2 * PIECE_BYTES
    await taken(lambda: made.is_cancelled)  # by the second, of which none was read


async def test_a_whole_answer_above_the_bound_is_read() -> None:
    unread, made = Unread(64 * 1024, MIB, patience_s=0), Made(1, item_bytes=300 * 1024)
    answer = Answer(made, unread, "one")
    read_bytes = 0
    with pytest.raises(StopAsyncIteration):
        while piece := await answer.__anext__():
            read_bytes += sum(len(part["body"]) for part in pickle.loads(piece))
    assert read_bytes == 300 * 1024 and unread.size_bytes == 0 and not made.is_cancelled


async def test_of_all_together_the_largest_is_ended() -> None:
    unread = Unread(MIB, 100 * 1024)
    large, small = Made(80, ends=False), Made(10, ends=False)
    first, second = Answer(large, unread, "large"), Answer(small, unread, "small")
    await first.__anext__()
    await second.__anext__()
    await taken(lambda: first.size_bytes > 80 * 1024 and second.size_bytes > 10 * 1024)
    third = Answer(Made(50, ends=False), unread, "third")
    await third.__anext__()
    await taken(lambda: third.size_bytes > 50 * 1024)
    assert large.is_cancelled and not small.is_cancelled
    assert unread.size_bytes == second.size_bytes + third.size_bytes
    for answer in (second, third):
        answer.cancel()
    assert unread.size_bytes == 0


async def test_an_answer_that_is_dropped_is_counted_no_more() -> None:
    unread = Unread(MIB, MIB)
    await read_one(unread)
    assert unread.size_bytes == 0


async def read_one(unread: Unread) -> None:
    answer = Answer(Made(20), unread, "one")
    await answer.__anext__()
    await taken(lambda: answer._taker is not None and answer._taker.done())
    assert unread.size_bytes > 20 * 1024
