"""Media that a client names by URL, fetched from public hosts under limits.

A URL is `http` or `https`, a host, port 80, 443 or any above 1023, a path and a query: no user name, no fragment. It is
parsed once, and its host is resolved once; the connection goes to one of the addresses that were checked, so that no
second answer of the name server, no other reading of the URL and no redirect can lead inside the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import random
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

import httpx

from omni_cluster.openai_api.errors import BadRequest, media_too_large
from omni_cluster.types.errors import ConfigError

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_SCHEME_PORTS: Final = {"http": 80, "https": 443}
_MIN_FREE_PORT: Final = 1024
_MAX_PORT: Final = 65_535
_PASSING_STATUSES: Final = (502, 503, 504)
_FIRST_WAIT_S: Final = 0.1
# A server that sends byte by byte would keep the event loop busy with the framing of each.
_MAX_SMALL_PIECES: Final = 4096
_SMALL_PIECE_BYTES: Final = 128
# More than any head that httpx takes; of those of status 1xx, each of 17 bytes or more, it would pass over any number.
_MAX_HEAD_BYTES: Final = 131_072
_CONNECTED: Final = ("connection.connect_tcp.complete", "connection.start_tls.complete")
_HEAD_CAME: Final = "http11.receive_response_headers.complete"

_ANOTHER_WAY: Final = "use another URL or send the file as a base64 data URL"

_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
# C libraries read 2130706433, 0x7f.1 and 127.1 as addresses.
_NUMBER_AT_THE_END: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

# Refused even where private addresses are allowed: no media are there, but credentials of the machine may be.
_NEVER: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "169.254.0.0/16",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "100.100.100.200/32",  # Metadata of Alibaba Cloud, in the range of carriers.
        "168.63.129.16/32",  # Metadata of Azure, in the public range.
        "::/128",
        "64:ff9b:1::/48",
        "2001::/32",
        "2002::/16",
        "fd00:ec2::/32",  # Metadata of AWS.
        "fd20:ce::254/128",  # Metadata of Google Cloud.
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_DOCUMENTATION: Final = ipaddress.IPv6Network("3fff::/20")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class FetchLimits:
    """What fetching may take; `timeout_s` is that of one whole fetch, its wait for others and its retries included.

    An empty `allowed_hosts` stands for every public host. `allow_private` is for tests and closed networks; link-local,
    multicast, reserved and cloud metadata addresses stay refused.
    """

    max_bytes: int
    timeout_s: float
    max_concurrent: int
    retries: int
    allowed_hosts: tuple[str, ...] = ()
    allow_private: bool = False


class _PassingFailure(BadRequest):
    """A refusal that another attempt may turn into an answer."""


@dataclass(frozen=True)
class _Target:
    """The parts of one URL that was accepted; `host` is an ASCII name or an address, `port` None for the scheme's."""

    param: str
    scheme: str
    host: str
    port: int | None
    raw_path: str

    @property
    def origin_port(self) -> int:
        return self.port or _SCHEME_PORTS[self.scheme]

    def request(self, address: IPv4Address | IPv6Address, connect_timeout_s: float) -> httpx.Request:
        """A request to `address` that asks for `host`; TLS is for `host`, too."""
        url = httpx.URL(scheme=self.scheme, host=str(address), port=self.port, raw_path=self.raw_path.encode())
        name = f"[{self.host}]" if ":" in self.host else self.host
        headers = {
            "Host": name if self.port is None else f"{name}:{self.port}",
            "User-Agent": "omni-cluster",
            "Accept": "*/*",
            # Compressed, a body within the limit could become one far above it.
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        extensions = {
            "timeout": httpx.Timeout(None, connect=connect_timeout_s).as_dict(),
            "sni_hostname": self.host,
            "trace": _Head(self).follow,
        }
        return httpx.Request("GET", url, headers=headers, extensions=extensions)

    def refusal(
        self, what: str, *, code: str = "fetch_failed", status: int = 400, may_pass: bool = False
    ) -> BadRequest:
        kind = _PassingFailure if may_pass else BadRequest
        return kind(f"{self.param} {what}.", param=self.param, code=code, status=status)


class _Head:
    """What an answer has before its body, within `_MAX_HEAD_BYTES`."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._bytes = 0
        self._has_come = False

    async def follow(self, step: str, info: Mapping[str, Any]) -> None:
        """Called by httpx with each step of the request: its extension "trace"."""
        if step in _CONNECTED:
            self._count(info["return_value"])
        elif step == _HEAD_CAME:
            self._has_come = True

    def _count(self, connection: Any) -> None:
        read = connection.read

        async def counted(*args: Any, **kwargs: Any) -> bytes:
            self._check()
            data: bytes = await read(*args, **kwargs)
            self._bytes += len(data)
            return data

        connection.read = counted

    def _check(self) -> None:
        if not self._has_come and self._bytes >= _MAX_HEAD_BYTES:
            raise self._target.refusal(
                f"is on {self._target.host}, which sends {_MAX_HEAD_BYTES} bytes and more before the file; "
                f"{_ANOTHER_WAY}"
            )


class TotalBytes:
    """How many bytes the files of one request may have together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0

    def add(self, size_bytes: int, param: str) -> None:
        """Raises BadRequest (413) that names `param` once there are more than may be."""
        self._total += size_bytes
        if self._total > self._most:
            raise media_too_large(
                param,
                f"{param} and the files before it have {self._total} bytes, but at most {self._most} are accepted.",
            )


class Fetcher:
    """Fetches media for every path that takes URLs; one object an event loop, so that its bounds hold for all of them.

    `resolve` gives the addresses of a host and port; left out, it is the system's resolver. `ssl_context` decides which
    certificates are trusted; left out, those of the public authorities are. The environment changes nothing.

    Raises ConfigError for an allowed host that is none.
    """

    def __init__(
        self, limits: FetchLimits, *, resolve: Resolve | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits
        self._allowed_hosts = frozenset(_allowed_host(host) for host in limits.allowed_hosts)
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        # Threads of its own: a slow name server must not hold those that other work of the process waits for.
        self._threads = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="resolve")
        self._resolve = resolve or self._system_addresses
        # A connection belongs to one fetch: kept, it would serve another host that has the same address.
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl_context or httpx.create_ssl_context(trust_env=False),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._is_closed = False

    async def fetch(self, url: str, param: str) -> bytes:
        """The body at `url`, whatever its server says it is.

        Raises BadRequest that names `param`: `url_not_supported` for a URL of another form, `url_forbidden` for a host
        that is not allowed or not public, `media_too_large` (413), `fetch_failed` for a host that cannot be reached, a
        status other than 200, a redirect or a compressed body, and `fetch_timeout`. A cancelled fetch closes its
        connection.
        """
        target = _target(url, param)
        self._check_allowed(target)
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._slots:
                self._check_open(target)
                addresses = await self._checked_addresses(target)
                return await self._with_retries(target, addresses)
        except TimeoutError:
            raise target.refusal(
                f"was not fetched from {target.host} within {self._limits.timeout_s:g} s; {_ANOTHER_WAY}",
                code="fetch_timeout",
            ) from None

    async def close(self) -> None:
        """Close every connection; fetches that are under way or begun later are refused (503)."""
        self._is_closed = True
        self._threads.shutdown(wait=False)
        await self._transport.aclose()

    def _check_open(self, target: _Target) -> None:
        if self._is_closed:
            raise target.refusal("cannot be fetched, because this server is stopping; try again later", status=503)

    def _check_allowed(self, target: _Target) -> None:
        if self._allowed_hosts and target.host not in self._allowed_hosts:
            raise target.refusal(
                f"is on {target.host}, which is not among the hosts that are fetched from; {_ANOTHER_WAY}",
                code="url_forbidden",
            )

    async def _checked_addresses(self, target: _Target) -> Sequence[IPv4Address | IPv6Address]:
        """All addresses of the host. One that is refused refuses all, because any of them may be connected to."""
        literal = _literal(target.host)
        addresses = [literal] if literal else await self._resolved(target)
        if any(_is_forbidden(address, self._limits.allow_private) for address in addresses):
            raise target.refusal(
                f"is on {target.host}, which is not a public host; {_ANOTHER_WAY}", code="url_forbidden"
            )
        return addresses

    async def _resolved(self, target: _Target) -> list[IPv4Address | IPv6Address]:
        found: Sequence[str] = ()
        with contextlib.suppress(OSError):
            found = await self._resolve(target.host, target.origin_port)
        if not found:
            raise target.refusal(f"is on {target.host}, which has no address; {_ANOTHER_WAY}")
        return [ipaddress.ip_address(address) for address in found]

    async def _system_addresses(self, host: str, port: int) -> Sequence[str]:
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(place[0]) for *_, place in found))

    async def _with_retries(self, target: _Target, addresses: Sequence[IPv4Address | IPv6Address]) -> bytes:
        """Each attempt takes the next address."""
        attempt = 0
        while True:
            try:
                return await self._attempt(target, addresses[attempt % len(addresses)])
            except _PassingFailure:
                if attempt >= self._limits.retries:
                    raise
            await asyncio.sleep(_FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0))
            attempt += 1

    async def _attempt(self, target: _Target, address: IPv4Address | IPv6Address) -> bytes:
        self._check_open(target)
        # An address that swallows packets leaves time for the next one.
        request = target.request(address, self._limits.timeout_s / (self._limits.retries + 1))
        try:
            response = await self._transport.handle_async_request(request)
            try:
                _check_head(response, target, self._limits.max_bytes)
                return await _body(response, target, self._limits.max_bytes)
            finally:
                await response.aclose()
        except (httpx.NetworkError, httpx.ConnectTimeout):
            raise target.refusal(
                f"is on {target.host}, to which a connection failed (with https, its certificate has to be valid); "
                f"{_ANOTHER_WAY}",
                may_pass=True,
            ) from None
        except httpx.TransportError:
            raise target.refusal(f"is on {target.host}, which sent a broken answer; {_ANOTHER_WAY}") from None


def _target(url: str, param: str) -> _Target:
    parsed = _parsed(url)
    host = _host(parsed) if parsed else None
    if parsed is None or parsed.scheme not in _SCHEME_PORTS or host is None:
        raise _unsupported(param, "is no http or https URL with a host's name", "'https://<host>/<path>'")
    if parsed.userinfo or "#" in url:
        raise _unsupported(param, "has a user name, a password or a fragment", "the URL without them")
    if parsed.port is not None and not _is_accepted_port(parsed.port):
        raise _unsupported(param, "names another port", f"a URL with port 80, 443 or {_MIN_FREE_PORT} and above")
    return _Target(param, parsed.scheme, host, parsed.port, parsed.raw_path.decode("ascii"))


def _parsed(url: str) -> httpx.URL | None:
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError):
        return None


def _host(url: httpx.URL) -> str | None:
    """The host as an address in its usual form, or as an ASCII name; None for what is neither."""
    host = url.raw_host.decode("ascii")
    literal = _literal(host)
    if literal:
        return str(literal)
    is_name = _HOST_NAME.fullmatch(host) and not _NUMBER_AT_THE_END.fullmatch(host)
    return host if is_name else None


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_accepted_port(port: int) -> bool:
    return port in _SCHEME_PORTS.values() or _MIN_FREE_PORT <= port <= _MAX_PORT


def _unsupported(param: str, fault: str, wish: str) -> BadRequest:
    return BadRequest(
        f"{param} {fault}, which is not fetched; send {wish}, or the file as a base64 data URL.",
        param=param,
        code="url_not_supported",
    )


def _allowed_host(name: str) -> str:
    try:
        host = _host(httpx.URL(scheme="https", host=name))
    except (httpx.InvalidURL, UnicodeError):
        host = None
    if host is None:
        raise ConfigError(f"The allowed host {name!r} is not the name of a host; use one such as 'media.example.org'.")
    return host


def _is_forbidden(address: IPv4Address | IPv6Address, allow_private: bool) -> bool:
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return True
        address = _inner(address)
    if any(address in network for network in _NEVER):
        return True
    return not (allow_private or _is_public(address))


def _inner(address: IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that a mapped or NAT64 address leads to, or the address itself."""
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (address not in _GLOBAL_UNICAST or address in _DOCUMENTATION):
        return False
    return address.is_global


def _check_head(response: httpx.Response, target: _Target, max_bytes: int) -> None:
    status = response.status_code
    if 300 <= status < 400:
        raise target.refusal(f"is on {target.host}, which redirects elsewhere; send the URL that it leads to")
    if status != httpx.codes.OK:
        raise target.refusal(
            f"is on {target.host}, which answers with status {status} instead of 200; {_ANOTHER_WAY}",
            may_pass=status in _PASSING_STATUSES,
        )
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise target.refusal(f"is on {target.host}, which compresses its answer; {_ANOTHER_WAY}")
    if int(response.headers.get("content-length", "0")) > max_bytes:
        raise _too_large(target, max_bytes)


async def _body(response: httpx.Response, target: _Target, max_bytes: int) -> bytes:
    data = bytearray()
    pieces = 0
    async for piece in response.aiter_raw():
        pieces += 1
        if len(data) + len(piece) > max_bytes:
            raise _too_large(target, max_bytes)
        data += piece
        if pieces > _MAX_SMALL_PIECES and len(data) < pieces * _SMALL_PIECE_BYTES:
            raise target.refusal(
                f"is on {target.host}, which sends chunks below {_SMALL_PIECE_BYTES} bytes; {_ANOTHER_WAY}"
            )
    return bytes(data)


def _too_large(target: _Target, max_bytes: int) -> BadRequest:
    return target.refusal(
        f"has more than the {max_bytes} bytes that are accepted; send a smaller file",
        code="media_too_large",
        status=413,
    )
