"""Notices that the other end of a connection is gone without a word: its power, its network, or it is frozen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

BEAT_S = 1.0
"""Each end says at least so often that it lives."""
MISSED_BEATS = 8
"""Beats without anything from the other end until it is held to be gone. An event loop that is busy for some seconds is
not: what has so long a step would have stopped every stream already."""

# What the kernel does beside that, for an end whose own event loop is stuck: it gives up as late.
_OPTIONS = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}


class Heartbeat:
    """One end of a connection. It counts its own beats and not seconds: who was itself frozen blames nobody."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._missed = 0
        self.is_lost = False
        keep_alive(writer.get_extra_info("socket"))

    def heard(self) -> None:
        """Something came from the other end."""
        self._missed = 0

    async def keep(self, beat: Callable[[], None]) -> None:
        """Calls `beat` once a beat; cuts the connection, and returns, when the other end has been silent too long."""
        while self._missed < MISSED_BEATS:
            await asyncio.sleep(BEAT_S)
            self._missed += 1
            beat()
        self.is_lost = True
        self._writer.transport.abort()  # to close it would wait until what was written has arrived


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
