"""Clients that do not behave: they send nothing, send slowly, or read nothing."""

from __future__ import annotations

import json
import resource
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.served.app import BASE_URL

ADDRESS = (urlsplit(BASE_URL).hostname or "", urlsplit(BASE_URL).port or 80)
SMALL_BYTES = 2048
SMALL_SEGMENT_BYTES = 536
"""With both, the kernels of the two ends keep some 44 KB of an answer that is not read, and not 2 MB."""
FILES = 8192


class Connections:
    """`with Connections() as connections:` closes all of them at its end."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def __enter__(self) -> Connections:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(FILES, hard)), hard))
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._open:
            each.close()

    def open(self) -> socket.socket:
        """One that takes little at once."""
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
        made.settimeout(60)
        made.connect(ADDRESS)
        self._open.append(made)
        return made

    def ask(self, path: str, body: dict[str, Any], *, missing_bytes: int = 0, **headers: str) -> socket.socket:
        """Sends a request, but for the last `missing_bytes` of its body, and reads nothing of the answer."""
        sent = json.dumps(body).encode()
        made = self.open()
        made.sendall(head(path, len(sent), **headers) + sent[: len(sent) - missing_bytes])
        return made


def head(path: str, length: int, **headers: str) -> bytes:
    lines = {"Host": "here", "Content-Type": "application/json", "Content-Length": str(length), **headers}
    return "\r\n".join([f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    answer = bytearray()
    while part := connection.recv(65_536):
        answer += part
    return bytes(answer)
