"""HTTP/1.1 as uvicorn has it, for requests that offer another protocol too."""

from __future__ import annotations

from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OFFER: Final = frozenset({b"upgrade", b"http2-settings"})
"""Headers of an offer; `Connection` names them."""


class HttpProtocol(HttpToolsProtocol):
    """Serves a request that offers a protocol besides HTTP/1.1, such as Java's clients do with h2c, as if it did not.

    To httptools all that follows such a request's head is of the other protocol: uvicorn drops it, and the request has
    no body. Here the head is read again without the offer, and what follows after it. A WebSocket's is taken.
    """

    _is_declined = False

    def on_headers_complete(self) -> None:
        self._is_declined = self.parser.should_upgrade() and not self._is_taken()
        if not self._is_declined:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_declined:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._feed(rest) :]
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _feed(self, data: memoryview) -> int:
        """Returns how many bytes were read: those up to an offer's end, or all."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_declined:
                self._read_again()
                return int(upgrade.args[0])
            if self._should_upgrade():
                self.handle_websocket_upgrade()
        return len(data)

    def _is_taken(self) -> bool:
        return self._should_upgrade() or self.parser.get_method() == b"CONNECT"  # no offer, but httptools says so

    def _read_again(self) -> None:
        version = self.parser.get_http_version().encode()
        start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        headers = [b"%s: %s" % header for header in without_offer(self.headers)]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self.parser.feed_data(b"\r\n".join([start, *headers, b"\r\n"]))


def without_offer(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers as they came, their names in lower case, but for those of the offer."""
    kept = []
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(each for each in _listed(value) if each.lower() not in OFFER)
        if name not in OFFER:
            kept.append((name, value))
    return kept


def _listed(value: bytes) -> list[bytes]:
    return [each.strip() for each in value.split(b",")]


def use_in_this_process() -> None:
    """Has all servers of uvicorn here speak `HttpProtocol` on each connection that comes, those that run included.

    For a server that others make: Ray Serve makes its proxy's, and offers no choice of the protocol.
    """
    HttpToolsProtocol.__init__ = _begin_as_ours  # type: ignore[assignment, method-assign]


_begin = HttpToolsProtocol.__init__


def _begin_as_ours(protocol: HttpToolsProtocol, *args: Any, **options: Any) -> None:
    if type(protocol) is HttpToolsProtocol:
        protocol.__class__ = HttpProtocol
    _begin(protocol, *args, **options)
