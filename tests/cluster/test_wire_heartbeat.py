"""A peer that is gone without a word: both ends notice it, and who is only busy is not taken for gone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from omni_cluster.cluster import wire
from omni_cluster.cluster.consumer import SocketClient
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.producer import Address, SocketServer
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.cluster.wire import BEAT_S, MISSED_BEATS, Subscription, keep_alive, read_frame, write_frame
from omni_cluster.engine.output_log import OutputLog, OutputLogs
from omni_cluster.types.errors import StageDied
from omni_cluster.types.outputs import StageChunk

READER = Subscription(3, "r", "publisher")
NOTICED_S = 10.0
"""Within this time a peer's silent loss is noticed."""
PATIENCE_S = 60.0


class At:
    """A stage's replica that says it listens at this address."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.loads = Loads()

    async def call(self, method: str, replica_id: str) -> Address:
        return self._address


def client_to(address: Address) -> SocketClient:
    return SocketClient(cast(RemoteStage, At(address)), "replica")


class Between:
    """Stands between both ends as a network does, and can stop to carry anything, without a word to either."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.carries = asyncio.Event()
        self.carries.set()

    async def address(self) -> Address:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1], self._address.secret)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(self._address.host, self._address.port)
        await asyncio.gather(self._copy(reader, outer), self._copy(inner, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                await self.carries.wait()
                writer.write(data)
            await self.carries.wait()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
def logs() -> OutputLogs:
    return OutputLogs(1 << 26)


@pytest.fixture
async def server(logs: OutputLogs) -> AsyncIterator[SocketServer]:
    server = SocketServer(logs, "127.0.0.1")
    yield server
    await server.close()


async def is_read(log: OutputLog) -> None:
    """The reader's wish has come through the network."""
    while not log._listeners:
        await asyncio.sleep(0.01)


def test_the_bound_is_met_by_its_parts() -> None:
    assert BEAT_S * (MISSED_BEATS + 1) < NOTICED_S


async def test_both_ends_notice_a_network_that_carries_nothing_any_more(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.05)
    log = logs.open("r")
    network = Between(await server.address())
    messages = client_to(await network.address()).messages(READER)
    assert await anext(messages) == [] and len(server) == 1
    await is_read(log)
    network.carries.clear()
    with pytest.raises(StageDied, match="nothing comes from it"):
        await anext(messages)
    await asyncio.wait_for(log.until_given_up(PATIENCE_S), PATIENCE_S)  # its producer works for nobody
    while len(server):
        await asyncio.sleep(0.01)
    network.carries.set()


async def test_what_cannot_be_sent_is_dropped_with_its_reader(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's buffers are full of what nobody takes."""
    monkeypatch.setattr(wire, "BEAT_S", 0.05)
    log = logs.open("r")
    network = Between(await server.address())
    messages = client_to(await network.address()).messages(READER)
    await anext(messages)
    await is_read(log)
    network.carries.clear()
    for start in range(64):
        log.put(StageChunk(start, (1,), text="x" * (1 << 18)))
    await asyncio.wait_for(log.until_given_up(PATIENCE_S), PATIENCE_S)
    while len(server):
        await asyncio.sleep(0.01)
    await messages.aclose()
    network.carries.set()


async def test_idle_ends_that_live_stay_connected(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.02)
    log = logs.open("r")
    messages = client_to(await server.address()).messages(READER)
    await anext(messages)
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(4 * MISSED_BEATS * wire.BEAT_S)  # in which it would have ended four times
    assert not waiting.done() and len(server) == 1
    log.put(StageChunk(token_ids=(1,)))
    assert (await waiting)[0].chunk is not None
    await messages.aclose()


async def test_who_was_busy_itself_blames_nobody(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.02)
    log = logs.open("r")
    messages = client_to(await server.address()).messages(READER)
    await anext(messages)
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    time.sleep(4 * MISSED_BEATS * wire.BEAT_S)  # the event loop of both is stuck
    log.put(StageChunk(token_ids=(1,)))
    assert (await waiting)[0].chunk is not None
    await messages.aclose()


async def test_a_frame_that_takes_long_to_come_is_a_sign_of_life(
    server: SocketServer, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.05)
    sides: list[asyncio.StreamWriter] = []
    ends: list[asyncio.StreamReader] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(reader)
        sides.append(writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.sockets[0].getsockname()[1])
    heart = wire.Heartbeat(writer)
    keeper = asyncio.create_task(heart.keep(lambda: None))
    reading = asyncio.create_task(read_frame(reader, 1 << 20, heart.heard))
    while not sides:
        await asyncio.sleep(0)
    written = bytearray()

    class Slow:
        def writelines(self, parts: list[bytes]) -> None:
            written.extend(b"".join(parts))

    write_frame(cast(asyncio.StreamWriter, Slow()), [b"x" * 1000])
    for at in range(0, len(written), 100):  # twice as long as silence may last
        sides[0].write(written[at : at + 100])
        await asyncio.sleep(2 * MISSED_BEATS * wire.BEAT_S / 10)
    assert len((await reading)[1][0]) == 1000 and not heart.is_lost
    keeper.cancel()
    writer.close()
    sides[0].close()
    listener.close()


def test_the_kernel_watches_too() -> None:
    with socket.socket() as one:
        keep_alive(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 0 < one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 1000 * NOTICED_S
