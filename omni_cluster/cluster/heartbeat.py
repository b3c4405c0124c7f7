"""Notices that the other end of a connection is gone without closing it: no power, no network, or frozen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

BEAT_S = 1.0
"""Each end sends something at least this often."""
MISSED_BEATS = 8
"""After so many beats without anything from the other end, it counts as gone. An event loop that is busy for a few
seconds does not: longer steps would already have stopped every stream."""

# The kernel gives up about as late, for an end whose own event loop is stuck.
_OPTIONS = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}


class Heartbeat:
    """One end of a connection. It counts its own beats, not seconds: one that was frozen does not blame the other."""

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
        self._writer.transport.abort()  # close() would wait until all that was written has arrived


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
