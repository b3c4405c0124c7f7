"""A client that offers h2c with each of its requests, as Java's HttpClient and Ktor do."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import httpx

OFFER = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAMAAABkAAQAoAAA",
}
WAYS = [(chunked, in_two) for chunked in (False, True) for in_two in (False, True)]
"""How a body is sent: with its length or in chunks, in the head's segment or behind it."""


@dataclass(frozen=True)
class Answered:
    status: int
    body: bytes


class Offering:
    """One connection; `url`: of a server that answers `/health`."""

    def __init__(self, url: str) -> None:
        self._url = url
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Offering:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def ask(self, path: str, body: bytes, *, chunked: bool = False, in_two: bool = False) -> Answered:
        length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
        start = head("POST", path, OFFER | length | {"Content-Type": "application/json"})
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        if in_two:
            self._socket.sendall(start)
            httpx.get(f"{self._url}/health").raise_for_status()  # by then the server has read the head
            start = b""
        self._socket.sendall(start + sent)
        return self.answered()

    def send(self, sent: bytes) -> None:
        self._socket.sendall(sent)

    def answered(self) -> Answered:
        answer = http.client.HTTPResponse(self._socket, method="POST")
        answer.begin()
        return Answered(answer.status, answer.read())


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()
