"""A connection from replica to replica, over TCP: the consuming end.

A call of Serve's takes milliseconds, whatever is in it, and each step makes tokens. A call gives the replica's address
and the secret that both ends prove to know: so only processes that can call replicas can read from them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import msgspec

from omni_cluster.cluster.loads import BROKEN_COOLDOWN_S
from omni_cluster.cluster.socket_server import MAX_ITEM_BYTES, Address
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.cluster.wire import (
    GREETING_S,
    Heartbeat,
    MessageItem,
    RowsConfirmed,
    Subscription,
    prove_secret,
    read_frame,
    unpacked,
    write_frame,
)
from omni_cluster.errors import StageDied

GREETINGS = 4
"""Attempts at a handshake: a replica that many connect to at once ends the oldest handshakes."""
AGAIN_S = 0.2
MAX_FRAME_BYTES = 64 << 20
"""What a reader accepts: the sound in a message, and all that is around it."""


class SocketClient:
    """The consuming end of one connection."""

    def __init__(self, source: RemoteStage, replica_id: str) -> None:
        self._source = source
        self._replica_id = replica_id
        self._writer: asyncio.StreamWriter | None = None

    async def messages(self, first: Subscription) -> AsyncGenerator[list[MessageItem], None]:
        """Opens the connection with its first reader; the first message is empty.

        Raises StageDied when it breaks, or nothing comes on it any more: whether or not it is read, this is the
        first that is known of a replica that is gone.
        """
        address: Address = await self._source.call("address", replica_id=self._replica_id)
        heartbeat = keeper = None
        try:
            reader, self._writer = await self._connected(address)
            heartbeat = Heartbeat(self._writer)
            keeper = asyncio.create_task(heartbeat.keep(self._beat))
            self._say(self._writer, first)
            while True:
                load, parts = await read_frame(reader, MAX_FRAME_BYTES, heartbeat.heard)
                self._source.loads.on_report(self._replica_id, load)
                if parts:
                    yield unpacked(parts)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._source.loads.on_loss(self._replica_id, BROKEN_COOLDOWN_S)
            why = "nothing comes from it" if heartbeat is not None and heartbeat.is_lost else error
            raise StageDied(f"the connection to replica {self._replica_id} broke: {why}") from error
        finally:
            self._source.loads.on_disconnect(self._replica_id)
            writer, self._writer = self._writer, None
            if keeper is not None:
                keeper.cancel()
            if writer is not None:
                writer.close()

    async def _connected(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Tries again if the replica ends the handshake: it keeps few at once. TimeoutError if it is not there."""
        for left in reversed(range(GREETINGS)):
            async with asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(address.host, address.port, limit=MAX_ITEM_BYTES)
            self._writer = writer
            try:
                await prove_secret(reader, writer, address.secret)
                break
            except (asyncio.IncompleteReadError, ConnectionResetError):
                writer.close()
                if not left:
                    raise
                await asyncio.sleep(random.uniform(0, AGAIN_S))
        return reader, writer

    async def subscribe(self, subscription: Subscription) -> bool:
        """Adds a reader once the connection is open; False when it has closed meanwhile."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._say(self._writer, subscription)
        try:
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    def confirm(self, rows_end: int) -> None:
        """Tells the replica that the rows of chunks before number `rows_end` are here, or are done without."""
        if self._writer is not None and not self._writer.is_closing():
            self._say(self._writer, RowsConfirmed(rows_end))

    def _say(self, writer: asyncio.StreamWriter, said: Subscription | RowsConfirmed) -> None:
        write_frame(writer, [msgspec.msgpack.encode(said)])

    def _beat(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            write_frame(self._writer, [])
