"""Connections from replica to replica: who may open one, what travels on it, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgpack
import msgspec
import numpy as np
import pytest
import torch
import uvloop
from msgspec.structs import replace

from omni_cluster.cluster import producer, wire
from omni_cluster.cluster.consumer import SocketClient
from omni_cluster.cluster.failures import StageFailed
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.producer import MAX_REQUEST_BYTES, REPORT_S, Address, SocketServer
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.cluster.wire import (
    _HEAD,
    _LENGTH,
    MessageItem,
    Subscription,
    packed,
    prove_secret,
    read_frame,
    unpacked,
    write_frame,
)
from omni_cluster.engine.output_log import OutputLogs
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import PayloadError, RequestError, StageDied, kind_named
from omni_cluster.types.outputs import (
    AudioChunk,
    CallDelta,
    HandoverTimes,
    ImageChunk,
    StageChunk,
    TokenChoice,
    TokenLogprob,
)
from tests.rows import rows_of

SOUND = StageChunk(audio=AudioChunk(0, np.arange(4, dtype=np.float32), 24_000), finish_reason="stop")
READER = Subscription(3, "r", "publisher")
FRESH_S = 0.1
"""Those who choose a replica know of its load what was so at that time."""


@pytest.fixture
def logs() -> OutputLogs:
    return OutputLogs(1 << 26)


@pytest.fixture
async def server(logs: OutputLogs) -> AsyncIterator[SocketServer]:
    server = SocketServer(logs, "127.0.0.1")
    yield server
    await server.close()


class Stage:
    """Says the address that it was given."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.loads = Loads()

    async def call(self, method: str, *args: Any, replica_id: str) -> Address:
        return self._address


async def client_to(server: SocketServer) -> SocketClient:
    return SocketClient(cast(RemoteStage, Stage(await server.address())), "replica")


def with_rows(count: int) -> StageChunk:
    rows = torch.arange(count * 8, dtype=torch.float32).reshape(count, 8).bfloat16()
    return StageChunk(0, (1,), rows=rows_of(0, rows, torch.arange(3 * count).reshape(3, count)))


async def test_the_address_stays_and_does_not_show_its_word(server: SocketServer) -> None:
    first, second = await asyncio.gather(server.address(), server.address())
    assert first == second and len(first.secret) == 32
    assert "secret" not in repr(first) and repr(first.secret) not in repr(first)


async def test_a_message_names_its_rows_which_are_kept_until_the_reader_confirms_them(
    server: SocketServer, logs: OutputLogs
) -> None:
    log = logs.open("r")
    log.put(with_rows(5000))
    log.close()
    held_bytes = logs.budget.held_bytes
    client = await client_to(server)
    messages = client.messages(READER)
    assert await anext(messages) == []
    items = await anext(messages)
    assert [item.reader for item in items] == [3, 3] and items[1].chunk is None and items[1].error is None
    assert items[0].chunk is not None and items[0].chunk.rows is None and items[0].rows_at == 0
    assert logs.budget.held_bytes > held_bytes + 5000 * 16
    client.confirm(1)
    async with asyncio.timeout(60):
        while logs.budget.held_bytes != held_bytes:
            await asyncio.sleep(0.01)
    await messages.aclose()


CLIENTS = Subscription(4, "r", None)
"""Of a reader that reads for a client: without rows."""


def said(number: int, **fields: Any) -> StageChunk:
    return StageChunk(number, (number,), str(number), **fields)


async def test_a_clients_reader_gets_the_first_token_and_the_end_at_once_and_what_is_between_gathered(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "GATHER_S", 3600.0)
    log = logs.open("r")
    client = await client_to(server)
    of_client, of_stage = client.messages(CLIENTS), client.messages(READER)
    for messages in (of_client, of_stage):
        assert await anext(messages) == []
    log.put(said(0))
    first = await anext(of_client)
    assert [item.chunk and item.chunk.text for item in first] == ["0"]
    gathered = asyncio.ensure_future(anext(of_client))
    for number in range(3):
        if number:
            log.put(said(number))
        (for_stage,) = await anext(of_stage)  # a stage's reader gets each as it comes
        assert for_stage.chunk is not None and for_stage.chunk.text == str(number)
    assert not gathered.done()
    log.put(said(3, finish_reason="stop"))
    log.close()
    rest, end = await asyncio.wait_for(gathered, 60)
    assert rest.chunk is not None and (rest.chunk.text, rest.chunk.finish_reason) == ("123", "stop")
    assert end.chunk is None and end.error is None
    await asyncio.gather(of_client.aclose(), of_stage.aclose())


async def test_what_was_gathered_comes_without_anything_behind_it(server: SocketServer, logs: OutputLogs) -> None:
    log = logs.open("r")
    messages = (await client_to(server)).messages(CLIENTS)
    assert await anext(messages) == []
    for number in range(3):
        log.put(said(number))
        (item,) = await asyncio.wait_for(anext(messages), 60)
        assert item.chunk is not None and item.chunk.text == str(number)
    await messages.aclose()


def test_all_that_a_message_says_arrives() -> None:
    sound = AudioChunk(480, np.linspace(-1, 1, 7, dtype=np.float32), 24_000)
    choices = (TokenChoice(TokenLogprob("ü", -0.5), (TokenLogprob("u", -1.5),)),)
    sent = [
        StageChunk(
            5, (6, 7), "ü", audio=sound, prompt_token_ids=(1, 2), made_at_s=12.5, choices=choices, cached_tokens=3
        ),
        StageChunk(
            7,
            audio=AudioChunk(487, np.zeros(0, np.float32), 24_000),
            finish_reason="stop",
            handover=HandoverTimes(1, 2),
            calls=(CallDelta(0, "call_1", "now", "{}"), CallDelta(0, arguments="ü")),
            images=(ImageChunk(0, b"\x89PNG"), ImageChunk(1, b"")),
            codes=Codes.of(3, [[1, -2], [3, 4]]),
        ),
    ]
    told = {name for chunk in sent for name in chunk.__struct_fields__ if getattr(chunk, name)}
    assert told == {*StageChunk.__struct_fields__} - {"rows"}  # a new field has its place here
    items = [MessageItem(i, chunk) for i, chunk in enumerate(sent)]
    items += [
        MessageItem(2, StageChunk(), rows_at=9),
        MessageItem(3, None),
        MessageItem(4, None, RequestError("too long")),
    ]
    items += [MessageItem(5, None, StageFailed("ZeroDivisionError: by zero")), MessageItem(6, None, OSError("gone"))]
    got = unpacked([bytes(part) for part in packed(items)])
    assert [item.reader for item in got] == [0, 1, 2, 3, 4, 5, 6]
    for item, chunk in zip(got, sent, strict=False):
        opened = item.chunk
        assert opened is not None and opened.audio is not None and chunk.audio is not None
        assert np.array_equal(opened.audio.samples, chunk.audio.samples) and opened.audio.samples.dtype == np.float32
        assert opened.audio.start == chunk.audio.start and opened.made_at_s == chunk.made_at_s
        assert replace(opened, audio=None) == replace(chunk, audio=None)
    assert got[2].rows_at == 9 and (got[3].chunk, got[3].error, got[3].rows_at) == (None, None, None)
    assert isinstance(got[4].error, RequestError) and str(got[4].error) == "too long"
    assert isinstance(got[5].error, StageFailed) and str(got[5].error) == "ZeroDivisionError: by zero"
    assert type(got[6].error) is StageFailed  # no name makes another class


def test_an_error_that_its_reader_does_not_know_is_the_kind_that_it_knows() -> None:
    class EngineBroke(StageDied):
        pass

    item = MessageItem(0, None, EngineBroke("the engine died"))
    (got,) = unpacked([bytes(part) for part in packed([item])])
    assert type(got.error) is EngineBroke
    assert kind_named(["OfAnotherProcess", "StageDied", "OmniError"]) is StageDied


def test_arrays_are_parts_of_their_own_and_not_copied() -> None:
    samples = np.arange(4000, dtype=np.float32)
    head, sound = packed([MessageItem(1, StageChunk(audio=AudioChunk(0, samples, 24_000)))])
    assert len(head) < 1000 and sound.obj is samples
    chunk = unpacked([head, sound])[0].chunk
    assert chunk is not None and chunk.audio is not None and chunk.audio.samples.tobytes() == bytes(sound)


@pytest.mark.parametrize("above", [0, 1])
async def test_a_request_above_its_limit_ends_the_connection(
    server: SocketServer, logs: OutputLogs, above: int
) -> None:
    empty = len(msgspec.msgpack.encode(Subscription(0, "r" * 1000, ""))) - 1000
    name = "r" * (MAX_REQUEST_BYTES - empty + above)
    logs.open(name).put(with_rows(1))
    request = msgspec.msgpack.encode(Subscription(0, name, ""))
    assert len(request) == MAX_REQUEST_BYTES + above
    address = await server.address()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    await prove_secret(reader, writer, address.secret)
    write_frame(writer, [request])
    assert unpacked((await read_frame(reader, 1000))[1]) == []
    if above:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await message_of(reader)
    else:
        assert len(unpacked(await message_of(reader))) == 1
    writer.close()


async def message_of(reader: asyncio.StreamReader) -> Sequence[bytes | bytearray]:
    """The next frame that is no beat."""
    while not (parts := (await read_frame(reader, 10_000))[1]):
        pass
    return parts


@pytest.mark.parametrize("parts", [[b"x" * 90, b"x" * 11], [b""] * 13])
async def test_a_frame_above_what_is_accepted_breaks_the_line(parts: list[bytes]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(_HEAD.pack(len(parts), 0))
    reader.feed_data(b"".join(_LENGTH.pack(len(part)) for part in parts) + b"".join(parts))
    with pytest.raises(ConnectionError, match=r"101 bytes, and 100 are accepted|13 parts"):
        await read_frame(reader, 100)


async def test_the_end_of_the_producer_breaks_the_line(server: SocketServer, logs: OutputLogs) -> None:
    logs.open("r")
    client = await client_to(server)
    messages = client.messages(READER)
    await anext(messages)
    waiting = asyncio.ensure_future(anext(messages))
    await server.close()
    with pytest.raises(StageDied, match="replica replica broke"):
        await waiting
    assert not await client.subscribe(READER)


async def test_a_replica_that_is_not_there_is_lost(server: SocketServer) -> None:
    address = await server.address()
    client = SocketClient(cast(RemoteStage, Stage(address)), "replica")
    await server.close()
    with pytest.raises(StageDied):
        await anext(client.messages(READER))


async def test_the_consumer_that_leaves_ends_the_connection(server: SocketServer, logs: OutputLogs) -> None:
    logs.open("r")
    messages = (await client_to(server)).messages(READER)
    await anext(messages)
    assert len(server) == 1
    await messages.aclose()
    while len(server):
        await asyncio.sleep(0)


def test_a_consumer_that_is_gone_as_something_is_sent_to_it_is_no_fault_of_ours(
    logs: OutputLogs, caplog: pytest.LogCaptureFixture
) -> None:
    """On the event loop of replicas, where a write to what has closed is a RuntimeError."""

    async def sends_to_what_has_closed() -> None:
        server = SocketServer(logs, "127.0.0.1")
        log = logs.open("r")
        messages = (await client_to(server)).messages(READER)
        await anext(messages)
        (writer,) = server._accepted.values()
        writer.transport.abort()
        log.put(SOUND)
        with pytest.raises(StageDied):
            await anext(messages)
        await server.close()

    uvloop.run(sends_to_what_has_closed())
    assert "a connection ended" not in caplog.text


async def test_every_frame_says_the_replica_s_load_and_a_change_is_told_soon(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 3600.0)  # the beat of a connection says it too, each second
    assert REPORT_S <= FRESH_S
    stage = Stage(await server.address())
    log = logs.open("r")
    messages = SocketClient(cast(RemoteStage, stage), "replica").messages(READER)
    await anext(messages)
    assert stage.loads._estimate("replica") == 1
    waiting = asyncio.ensure_future(anext(messages))
    async with asyncio.timeout(60):
        for name in ("s", "t"):
            logs.open(name)
        while stage.loads._estimate("replica") != 3:  # though no message says it
            await asyncio.sleep(0.01)
        logs.remove("s")
        while stage.loads._estimate("replica") != 2:
            await asyncio.sleep(0.01)
    log.put(with_rows(1))
    await waiting
    await messages.aclose()
    assert stage.loads._estimate("replica") is None  # what nobody tells any more is not known


async def test_who_has_read_the_end_of_a_request_knows_that_the_replica_is_done_with_it(
    server: SocketServer, logs: OutputLogs
) -> None:
    """Without that, the next request would be sent to another replica, as if this one were busier."""
    stage = Stage(await server.address())
    log = logs.open("r")
    messages = SocketClient(cast(RemoteStage, stage), "replica").messages(READER)
    await anext(messages)
    for chunk, load in [(with_rows(1), 1), (StageChunk(finish_reason="stop"), 0)]:
        log.put(chunk)
        await anext(messages)
        assert stage.loads._estimate("replica") == load
    await messages.aclose()


async def test_a_replica_whose_connection_breaks_is_known_to_be_lost_though_nobody_reads(server: SocketServer) -> None:
    stage = Stage(await server.address())
    left = SocketClient(cast(RemoteStage, stage), "left").messages(READER)
    await anext(left)
    await left.aclose()
    messages = SocketClient(cast(RemoteStage, stage), "replica").messages(READER)
    await anext(messages)
    assert stage.loads.living(["left", "replica"]) == ["left", "replica"]
    await server.close()
    with pytest.raises(StageDied):
        await anext(messages)
    assert stage.loads.living(["left", "replica"]) == ["left"]


@pytest.mark.parametrize("broken", ["no parts", "no head", "no text", "no dtype", "no MessagePack"])
def test_a_message_that_replicas_do_not_send_is_refused_as_one(broken: str) -> None:
    head, *arrays = (bytes(part) for part in packed([MessageItem(3, SOUND)]))
    parts = {
        "no parts": [],
        "no head": [head],
        "no text": [head.replace(b"stop", b"s\xff\xffp"), *arrays],
        "no dtype": [head.replace(b"<f4", b",,4"), *arrays],
        "no MessagePack": [b"\xc1", *arrays],
    }[broken]
    with pytest.raises(PayloadError, match=f"A message of {len(parts)} parts is not what replicas send"):
        unpacked(parts)


def test_a_chunk_on_the_wire_has_no_rows() -> None:
    head, *arrays = packed([MessageItem(3, SOUND)])
    message = msgpack.unpackb(head)
    message[0][1][3] = [0, [[1.0]], None]
    with pytest.raises(PayloadError, match="is not what replicas send: Expected `null`"):
        unpacked([msgpack.packb(message), *map(bytes, arrays)])
