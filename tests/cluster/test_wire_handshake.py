"""Who may read from a replica: both ends prove that they know the word, and neither says it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import cast

import msgspec
import pytest

from omni_cluster.cluster import producer, wire
from omni_cluster.cluster.consumer import SocketClient
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.producer import Address, SocketServer
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.cluster.wire import NONCE_BYTES, PROOF_BYTES, Subscription, _proof, prove_secret, write_frame
from omni_cluster.engine.output_log import OutputLogs
from omni_cluster.types.errors import StageDied
from omni_cluster.types.outputs import StageChunk

READER = Subscription(3, "r", "publisher")
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def logs() -> OutputLogs:
    logs = OutputLogs(1 << 20)
    logs.open("r").put(StageChunk(token_ids=(1,)))
    return logs


@pytest.fixture
async def server(logs: OutputLogs) -> AsyncIterator[SocketServer]:
    server = SocketServer(logs, "127.0.0.1")
    yield server
    await server.close()


async def connected(address: Address) -> Ends:
    return await asyncio.open_connection(address.host, address.port)


class At:
    """A stage's replica that says it listens at this address."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.loads = Loads()

    async def call(self, method: str, replica_id: str) -> Address:
        return self._address


def client_to(address: Address) -> SocketClient:
    return SocketClient(cast(RemoteStage, At(address)), "replica")


async def is_told_nothing(ends: Ends) -> bool:
    """Whether the server closes the connection without a word; asks for a request's output before."""
    reader, writer = ends
    try:
        write_frame(writer, [msgspec.msgpack.encode(READER)])
        return await reader.read() == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def all_are_gone(server: SocketServer) -> None:
    while len(server):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("said", ["nothing", "zeros", "noise", "other word", "the word itself", "half a proof"])
async def test_who_does_not_know_the_word_is_told_nothing(
    server: SocketServer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.2)
    address = await server.address()
    reader, writer = await connected(address)
    asked = await reader.readexactly(NONCE_BYTES)
    own = os.urandom(NONCE_BYTES)
    answers = {
        "nothing": b"",
        "zeros": bytes(NONCE_BYTES + PROOF_BYTES),
        "noise": os.urandom(NONCE_BYTES + PROOF_BYTES),
        "other word": own + _proof(b"x" * 32, b"reader", asked, own),
        "the word itself": address.secret * 2,
        "half a proof": own + _proof(address.secret, b"reader", asked, own)[:16],
    }
    writer.write(answers[said])
    if said in ("nothing", "half a proof"):
        assert await reader.read() == b""
        writer.close()
    else:
        assert await is_told_nothing((reader, writer))
    await all_are_gone(server)


async def test_what_was_heard_of_one_greeting_opens_no_other(server: SocketServer) -> None:
    address = await server.address()
    heard = bytearray()

    async def listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Stands between both ends, and keeps what the reader says."""
        inner, outer = await connected(address)
        outward = asyncio.create_task(copied(inner, writer, bytearray()))
        await copied(reader, outer, heard)
        outward.cancel()
        outer.close()
        writer.close()

    listener = await asyncio.start_server(listening, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    messages = client_to(Address("127.0.0.1", port, address.secret)).messages(READER)
    assert await anext(messages) == [] and (await anext(messages))[0].chunk is not None
    await messages.aclose()
    assert len(heard) > NONCE_BYTES + PROOF_BYTES and address.secret not in heard
    reader, writer = await connected(address)
    await reader.readexactly(NONCE_BYTES)
    writer.write(bytes(heard))
    assert await is_told_nothing((reader, writer))
    listener.close()


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    while data := await reader.read(4096):
        kept += data
        writer.write(data)


async def test_a_proof_cannot_be_sent_back_as_one_s_own(server: SocketServer) -> None:
    """Who knows nothing asks the server for a proof over the nonce that another connection was given."""
    address = await server.address()
    first, second = await connected(address), await connected(address)
    asked = await first[0].readexactly(NONCE_BYTES)
    await second[0].readexactly(NONCE_BYTES)
    second[1].write(asked + bytes(PROOF_BYTES))
    assert await second[0].read() == b""
    first[1].write(asked + _proof(address.secret, b"replica", asked, asked))
    assert await is_told_nothing(first)
    second[1].close()


async def test_who_listens_in_a_replica_s_place_is_found_out(server: SocketServer) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(NONCE_BYTES))
        await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        writer.write(bytes(PROOF_BYTES))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = Address("127.0.0.1", listener.sockets[0].getsockname()[1], b"word" * 8)
    with pytest.raises(StageDied, match="does not know the replica's secret"):
        await anext(client_to(address).messages(READER))
    listener.close()


async def test_who_listens_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = Address("127.0.0.1", listener.sockets[0].getsockname()[1], b"word" * 8)
    with pytest.raises(StageDied):
        await anext(client_to(address).messages(READER))
    listener.close()


async def test_a_thousand_strangers_take_few_places_and_keep_no_reader_out(server: SocketServer) -> None:
    address = await server.address()
    held: list[Ends] = []
    for _ in range(10):
        held += await asyncio.gather(*(connected(address) for _ in range(100)))
        assert len(server._strangers) <= producer.MAX_STRANGERS
        messages = client_to(address).messages(READER)
        assert await anext(messages) == [] and (await anext(messages))[0].chunk is not None
        await messages.aclose()
    while len(server) > producer.MAX_STRANGERS:
        await asyncio.sleep(0.01)
    for _, writer in held:
        writer.close()
    await all_are_gone(server)


async def test_as_many_readers_as_there_may_be_get_in_at_once(server: SocketServer) -> None:
    address = await server.address()

    async def first_of() -> bool:
        messages = client_to(address).messages(READER)
        await anext(messages)
        chunk = (await anext(messages))[0].chunk
        await messages.aclose()
        return chunk is not None

    assert all(await asyncio.gather(*(first_of() for _ in range(64))))


async def test_a_stranger_that_sends_without_end_is_not_kept(server: SocketServer) -> None:
    _, writer = await connected(await server.address())
    with pytest.raises(ConnectionError):
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
    writer.close()
    await all_are_gone(server)


async def test_both_ends_know_the_word(server: SocketServer) -> None:
    address = await server.address()
    reader, writer = await connected(address)
    await prove_secret(reader, writer, address.secret)
    writer.close()
