from __future__ import annotations

import asyncio
import datetime
import importlib.util
import ipaddress
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.fetch import Fetcher, FetchLimits, Resolve
from omni_cluster.types.errors import ConfigError

PARAM = "messages[0].content[1].image_url.url"
HOST = "media.example.org"
OTHER_HOST = "other.example.org"
PUBLIC = "93.184.216.34"
SECRET = "secret-token"
LEAKS = ("Errno", "Error", "ssl", "SSL", "CERTIFICATE", "h11", "httpx", "Traceback", SECRET)
MAX_BYTES = 100_000
PATIENCE_S = 10.0
SHORT_S = 2.0
"""Of a fetch that ends with its time, and in which even a busy machine connects."""
# Reading the public authorities takes longer than most of these tests.
TRUSTING_NONE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def limits(**changes: Any) -> FetchLimits:
    usual = {"max_bytes": MAX_BYTES, "timeout_s": PATIENCE_S, "max_concurrent": 8, "retries": 0, "allow_private": True}
    return FetchLimits(**{**usual, **changes})


@asynccontextmanager
async def fetcher(
    *addresses: str,
    resolve: Resolve | None = None,
    ssl_context: ssl.SSLContext | None = TRUSTING_NONE,
    **changes: Any,
) -> AsyncIterator[Fetcher]:
    """A fetcher that asks `resolve`, or for which every name has `addresses`, or 127.0.0.1."""

    async def same(host: str, port: int) -> Sequence[str]:
        return addresses or ["127.0.0.1"]

    fetching = Fetcher(limits(**changes), resolve=resolve or same, ssl_context=ssl_context)
    try:
        yield fetching
    finally:
        await fetching.close()


class Site:
    """A server on 127.0.0.1 that answers each request as `answer` says."""

    def __init__(self, answer: Answer) -> None:
        self.heads: list[str] = []
        self.port = 0
        self._answer = answer

    def url(self, host: str = HOST, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}/{SECRET}.png?a=b"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await self._answer(reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # The client went away, as it should in many tests.
        finally:
            writer.close()


@asynccontextmanager
async def site(answer: Answer | bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    serving = Site(send if isinstance(answer, bytes) else answer)
    server = await asyncio.start_server(serving.serve, "127.0.0.1", 0, ssl=tls)
    serving.port = server.sockets[0].getsockname()[1]
    try:
        yield serving
    finally:
        server.close()


def sized(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def until_close(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + body


def chunked(body: bytes, chunk_bytes: int = 1000) -> bytes:
    pieces = [body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)]
    framed = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


async def refused(fetching: Awaitable[bytes], code: str, status: int = 400) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await fetching
    error = caught.value
    assert (error.code, error.status, error.param) == (code, status, PARAM), error.message
    assert error.message.startswith(PARAM) and error.message.endswith(".")
    assert not any(leak in error.message for leak in LEAKS), error.message
    assert error.__cause__ is None
    return error


class Dials:
    """Addresses that sockets were connected to, in order; each connection is led to 127.0.0.1, or refused."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.refuse: set[str] = set()


@pytest.fixture
async def dials(monkeypatch: pytest.MonkeyPatch) -> Dials:
    """Below every library: what the event loop itself is asked to connect a socket to."""
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect
    record = Dials()

    async def detour(sock: socket.socket, place: tuple[Any, ...]) -> None:
        record.addresses.append(place[0])
        if place[0] in record.refuse:
            raise ConnectionRefusedError
        await connect(sock, ("127.0.0.1", place[1]))

    monkeypatch.setattr(loop, "sock_connect", detour)
    return record


async def test_a_body_comes_with_its_claimed_type() -> None:
    async with site(sized(b"picture", "Content-Type: image/png")) as server, fetcher() as fetching:
        fetched = await fetching.fetch(server.url(), PARAM)
    assert fetched == b"picture"


async def test_the_request_names_the_host_and_asks_for_no_compression() -> None:
    async with site(sized(b"")) as server, fetcher() as fetching:
        assert await fetching.fetch(server.url(), PARAM) == b""
    line, *headers = server.heads[0].strip().split("\r\n")
    assert line == f"GET /{SECRET}.png?a=b HTTP/1.1"
    assert f"Host: {HOST}:{server.port}" in headers and "Accept-Encoding: identity" in headers


async def test_nothing_is_remembered_between_fetches() -> None:
    async with site(sized(b"x", "Set-Cookie: a=b")) as server, fetcher() as fetching:
        await fetching.fetch(server.url(), PARAM)
        await fetching.fetch(server.url(), PARAM)
    assert len(server.heads) == 2 and not any("cookie" in head.lower() for head in server.heads)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, dials: Dials) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://10.9.9.9:3128")
    async with site(sized(b"x")) as server, fetcher(PUBLIC) as fetching:
        await fetching.fetch(server.url(), PARAM)
    assert dials.addresses == [PUBLIC]


@pytest.mark.parametrize("framed", [sized, until_close, chunked])
async def test_a_body_of_the_limit_is_accepted_and_one_byte_more_refused(framed: Callable[[bytes], bytes]) -> None:
    async with site(framed(b"x" * MAX_BYTES)) as server, fetcher() as fetching:
        assert len(await fetching.fetch(server.url(), PARAM)) == MAX_BYTES
    async with site(framed(b"x" * (MAX_BYTES + 1))) as server, fetcher() as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "media_too_large", 413)
    assert str(MAX_BYTES) in error.message


async def test_a_length_above_the_limit_is_refused_before_the_body_comes() -> None:
    gone = asyncio.Event()

    async def only_the_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {MAX_BYTES + 1}\r\n\r\n".encode())
        await reader.read()
        gone.set()

    async with site(only_the_head) as server, fetcher() as fetching:
        await refused(fetching.fetch(server.url(), PARAM), "media_too_large", 413)
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_an_endless_body_is_given_up_at_the_limit() -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(until_close(b""))
        try:
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()
        finally:
            gone.set()

    async with site(endless) as server, fetcher() as fetching:
        await refused(fetching.fetch(server.url(), PARAM), "media_too_large", 413)
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


HINT = b"HTTP/1.1 103 Early Hints\r\n\r\n"


async def endless_hints(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(HINT * 1000)
        await writer.drain()


async def test_an_endless_head_is_given_up() -> None:
    """Each hint keeps the event loop busy, until the time of the fetch is over."""
    async with site(endless_hints) as server, fetcher() as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "fetch_failed")
    assert "sends 131072 bytes and more before the file" in error.message


@pytest.mark.parametrize("head", [HINT * 1000, b"HTTP/1.1 103 Early Hints\r\nlink: " + b"x" * 90_000 + b"\r\n\r\n"])
async def test_hints_before_a_file_are_passed_over(head: bytes) -> None:
    body = b"x" * MAX_BYTES
    async with site(head + sized(body)) as server, fetcher() as fetching:
        assert await fetching.fetch(server.url(), PARAM) == body


async def test_a_body_in_tiny_pieces_is_refused() -> None:
    async with site(chunked(b"x" * 5000, chunk_bytes=1)) as server, fetcher() as fetching:
        await refused(fetching.fetch(server.url(), PARAM), "fetch_failed")


@pytest.mark.parametrize(
    "answer",
    [
        sized(b"", status="404 Not Found"),
        sized(b"", status="500 Internal Server Error"),
        sized(b"", "Content-Range: bytes 0-0/1", status="206 Partial Content"),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        sized(b"x", "Content-Encoding: gzip"),
        sized(b"x", "Content-Encoding: identity, br"),
        sized(b"x", "Transfer-Encoding: gzip, chunked"),
        sized(b"x", "X-Padding: " + "x" * 200_000),
        sized(b"x", "Content-Length: 2"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"",
    ],
)
async def test_an_answer_that_is_no_plain_200_is_refused_at_once(answer: bytes) -> None:
    async with site(answer) as server, fetcher(retries=3) as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "fetch_failed")
    assert len(server.heads) == 1 and HOST in error.message


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_not_followed(status: str, dials: Dials) -> None:
    answer = sized(b"", "Location: http://127.0.0.1:1/inside", status=status)
    async with site(answer) as server, fetcher(retries=3) as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "fetch_failed")
    assert "redirect" in error.message and "inside" not in error.message
    assert len(server.heads) == 1 and len(dials.addresses) == 1


def in_turn(*answers: bytes) -> Answer:
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))

    return answer


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_a_passing_status_is_tried_again_as_often_as_allowed(status: str) -> None:
    busy = sized(b"", status=status)
    async with site(in_turn(busy, busy, sized(b"x"))) as server, fetcher(retries=2) as fetching:
        assert await fetching.fetch(server.url(), PARAM) == b"x"
        assert len(server.heads) == 3
    async with site(in_turn(busy, busy, sized(b"x"))) as server, fetcher(retries=1) as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "fetch_failed")
        assert len(server.heads) == 2 and status[:3] in error.message


async def test_a_failed_connection_goes_to_the_next_address(dials: Dials) -> None:
    dials.refuse = {"93.184.216.1"}
    async with site(sized(b"x")) as server, fetcher("93.184.216.1", PUBLIC, retries=1, allow_private=False) as fetching:
        assert await fetching.fetch(server.url(), PARAM) == b"x"
    assert dials.addresses == ["93.184.216.1", PUBLIC]


async def test_a_host_that_cannot_be_connected_to_is_refused_after_the_retries(dials: Dials) -> None:
    dials.refuse = {PUBLIC}
    async with fetcher(PUBLIC, retries=2) as fetching:
        error = await refused(fetching.fetch(f"http://{HOST}/{SECRET}", PARAM), "fetch_failed")
    assert dials.addresses == [PUBLIC] * 3
    assert HOST in error.message and PUBLIC not in error.message


async def test_a_connection_lost_within_the_body_is_tried_again_from_the_start() -> None:
    async def reset_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.heads) > 1:
            writer.write(sized(b"whole"))
            return
        writer.write(sized(b"whole")[:-2])
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with site(reset_once) as server, fetcher(retries=1) as fetching:
        assert await fetching.fetch(server.url(), PARAM) == b"whole"
    assert len(server.heads) == 2


async def test_a_slow_body_ends_at_the_deadline() -> None:
    gone = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(b"x" * 10)[:-1])
        await reader.read()
        gone.set()

    begin_s = time.monotonic()
    async with site(slow) as server, fetcher(timeout_s=SHORT_S) as fetching:
        error = await refused(fetching.fetch(server.url(), PARAM), "fetch_timeout")
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
    assert SHORT_S <= time.monotonic() - begin_s < PATIENCE_S and f"{SHORT_S:g} s" in error.message


async def test_a_dripping_body_ends_at_the_deadline_of_the_whole_fetch() -> None:
    gone = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(until_close(b""))
        try:
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    async with site(drip) as server, fetcher(timeout_s=SHORT_S) as fetching:
        await refused(fetching.fetch(server.url(), PARAM), "fetch_timeout")
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_retries_and_waits_for_others_end_at_the_deadline() -> None:
    busy = sized(b"", status="503 Service Unavailable")
    async with site(busy) as server, fetcher(timeout_s=0.3, retries=100) as fetching:
        await refused(fetching.fetch(server.url(), PARAM), "fetch_timeout")
        assert len(server.heads) < 6

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with site(silent) as server, fetcher(timeout_s=0.5, max_concurrent=1) as fetching:
        begin_s = time.monotonic()
        fetches = [refused(fetching.fetch(server.url(), PARAM), "fetch_timeout") for _ in range(40)]
        await asyncio.gather(*fetches)
        assert time.monotonic() - begin_s < PATIENCE_S  # one after another they would take twice as long


async def test_a_slow_name_server_ends_at_the_deadline() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().create_future()

    async with fetcher(resolve=never, timeout_s=0.1) as fetching:
        await refused(fetching.fetch(f"http://{HOST}/", PARAM), "fetch_timeout")


async def test_no_more_than_the_allowed_number_run_at_once() -> None:
    release, full = asyncio.Event(), asyncio.Event()
    running = 0
    most = 0

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            full.set()
        await release.wait()
        running -= 1
        writer.write(sized(b"x"))

    async with site(hold) as server, fetcher(max_concurrent=2) as fetching:
        fetches = [asyncio.create_task(fetching.fetch(server.url(), PARAM)) for _ in range(6)]
        await asyncio.wait_for(full.wait(), PATIENCE_S)
        # Others had begun before this one, which is served after them.
        async with site(sized(b"marker")) as other, fetcher() as unbound:
            await unbound.fetch(other.url(), PARAM)
        assert most == 2
        release.set()
        assert await asyncio.gather(*fetches) == [b"x"] * 6
    assert most == 2 and len(server.heads) == 6


@pytest.mark.parametrize("sent", [b"", sized(b"x" * 100)[:-50]], ids=["before the head", "within the body"])
async def test_a_cancelled_fetch_closes_its_connection(sent: bytes) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.heads) > 1:
            writer.write(sized(b"x"))
            return
        writer.write(sent)
        await writer.drain()
        arrived.set()
        await reader.read()
        gone.set()

    async with site(hold) as server, fetcher(max_concurrent=1) as fetching:
        task = asyncio.create_task(fetching.fetch(server.url(), PARAM))
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        # Its place is free again.
        assert await fetching.fetch(server.url(), PARAM) == b"x"


async def test_closing_ends_the_fetches_under_way() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        gone.set()

    # With the system's resolver, whose threads end, too.
    fetching = Fetcher(limits(retries=5, max_concurrent=1), ssl_context=TRUSTING_NONE)
    async with site(hold) as server:
        running = asyncio.create_task(fetching.fetch(server.url("localhost"), PARAM))
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        waiting = asyncio.create_task(fetching.fetch(server.url("localhost"), PARAM))
        await fetching.close()
        for fetch in (running, waiting, fetching.fetch(server.url("localhost"), PARAM)):
            await refused(fetch, "fetch_failed", 503)
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
    assert len(server.heads) == 1


UNSUPPORTED = [
    "",
    "media.png",
    "//media.example.org/a.png",
    "http:media.example.org",
    "http:///etc/passwd",
    "http://:8080/",
    "file:///etc/passwd",
    "ftp://media.example.org/a.png",
    "gopher://media.example.org/",
    "ws://media.example.org/",
    "unix:///run/docker.sock",
    "data:image/png;base64,AAAA",
    " http://media.example.org/",
    "http://media.example.org/a b\r\nHost: x",
    "http://media.example.org\t/",
    "http://user@media.example.org/",
    "http://user:secret-token@media.example.org/",
    "http://:@media.example.org/",
    "http://media.example.org@127.0.0.1/",
    "http://127.0.0.1\\@media.example.org/",
    "http://media.example.org\\.internal/",
    "http://media.example.org#@127.0.0.1/",
    "http://media.example.org/a.png#",
    "http://media.example.org/#/../secret-token",
    "http://media.example.org:22/",
    "http://media.example.org:0/",
    "http://media.example.org:-80/",
    "http://media.example.org:65536/",
    "http://media.example.org:80a/",
    "http://media.example.org:80:80/",
    "http://media..example.org/",
    "http://.example.org/",
    "http://localhost./",
    "http://*.example.org/",
    "http://media%2eexample.org/",
    "http://%31%32%37.0.0.1/",
    "http://" + "a" * 64 + ".org/",
    "http://" + "a." * 130 + "org/",
    "http://[::1/",
    "http://[media.example.org]/",
    "http://[v1.a]/",
    "http://\ud800.example.org/",
    "http://media.example.org/\ud800",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://media.example.org/" + "a" * 70_000,
    # Other spellings of 127.0.0.1, which C libraries would read.
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://0x7F.0.0.0x1/",
    "http://017700000001/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.0.0.01/",
    "http://127.0.0.0x1/",
    "http://127.0.0.1./",
    "http://0/",
    "http://0x/",
    "http://256.256.256.256/",
]


@pytest.mark.parametrize("url", UNSUPPORTED, ids=lambda url: ascii(url)[:40])
async def test_a_url_of_another_form_is_refused_before_its_host_is_looked_up(url: str, dials: Dials) -> None:
    looked_up: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        looked_up.append(host)
        return [PUBLIC]

    async with fetcher(resolve=resolve) as fetching:
        await refused(fetching.fetch(url, PARAM), "url_not_supported")
    assert not looked_up and not dials.addresses


NEVER_FETCHED_FROM = [
    "0.0.0.0",
    "0.1.2.3",
    "169.254.169.254",
    "169.254.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.88.99.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "2001::7f00:1",
    "2002:7f00:1::",
    "2002:808:808::",
    "64:ff9b:1::a00:1",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "::ffff:0.0.0.0",
]
PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "100.127.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:100.64.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::c0a8:101",
    "fc00::1",
    "fd00::",
    "fdff::1",
    "100::1",
    "2001:db8::1",
    "2001:2::1",
    "3fff::1",
    "5f00::1",
    "4000::1",
]


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("address", [*NEVER_FETCHED_FROM, *PRIVATE, "fe80::1%lo", "2606:4700::1111%lo"])
async def test_an_address_that_is_not_public_is_never_connected_to(address: str, dials: Dials) -> None:
    async with fetcher(address, allow_private=False) as fetching:
        await refused(fetching.fetch(f"http://{HOST}/{SECRET}", PARAM), "url_forbidden")
        await refused(fetching.fetch(f"https://{in_url(address)}:8443/{SECRET}", PARAM), "url_forbidden")
    async with fetcher(PUBLIC, address, allow_private=False) as fetching:
        error = await refused(fetching.fetch(f"http://{HOST}/{SECRET}", PARAM), "url_forbidden")
    assert not dials.addresses and HOST in error.message and address not in error.message


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/",
        "http://LOCALHOST:8000/",
        "http://[0:0:0:0:0:0:0:1]/",
        "http://[::FFFF:7F00:1]/",
        "http://127.0.0.1:6379/",
        "http://127\u30020\u30020\u30021/",
        "http://[fe80::1%25eth0]/",
    ],
)
async def test_spellings_of_this_machine_are_never_connected_to(url: str, dials: Dials) -> None:
    fetching = Fetcher(limits(allow_private=False), ssl_context=TRUSTING_NONE)
    await refused(fetching.fetch(url, PARAM), "url_forbidden")
    await fetching.close()
    assert not dials.addresses


@pytest.mark.parametrize("address", NEVER_FETCHED_FROM)
async def test_machine_addresses_stay_refused_where_private_ones_are_allowed(address: str, dials: Dials) -> None:
    async with fetcher(address, allow_private=True) as fetching:
        await refused(fetching.fetch(f"http://{HOST}/{SECRET}", PARAM), "url_forbidden")
    assert not dials.addresses


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
async def test_a_public_address_is_connected_to_as_it_was_checked(address: str, dials: Dials) -> None:
    if ":" in address and not _has_ipv6():
        pytest.skip("this machine makes no IPv6 sockets")
    dials.refuse = {str(ipaddress.ip_address(address))}
    async with fetcher(address, allow_private=False) as fetching:
        await refused(fetching.fetch(f"http://{HOST}/{SECRET}", PARAM), "fetch_failed")
    assert [ipaddress.ip_address(dialled) for dialled in dials.addresses] == [ipaddress.ip_address(address)]


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_a_second_answer_of_the_name_server_is_not_asked_for(dials: Dials) -> None:
    answers = [[PUBLIC], ["127.0.0.1"], ["10.0.0.1"]]
    asked: list[tuple[str, int]] = []

    async def rebind(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return answers[len(asked) - 1]

    busy = sized(b"", status="503 Service Unavailable")
    rebinding = fetcher(resolve=rebind, retries=1, allow_private=False)
    async with site(in_turn(busy, sized(b"x"))) as server, rebinding as fetching:
        assert await fetching.fetch(server.url(), PARAM) == b"x"
        assert asked == [(HOST, server.port)] and dials.addresses == [PUBLIC, PUBLIC]
        await refused(fetching.fetch(server.url(), PARAM), "url_forbidden")
    assert len(asked) == 2 and len(dials.addresses) == 2


@pytest.mark.parametrize("fault", [socket.gaierror(-2, "Name or service not known"), TimeoutError(), None])
async def test_a_host_without_an_address_is_refused(fault: OSError | None) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        if fault:
            raise fault
        return []

    async with fetcher(resolve=resolve) as fetching:
        error = await refused(fetching.fetch(f"http://{HOST}/", PARAM), "fetch_failed")
    assert HOST in error.message


async def test_the_systems_resolver_is_asked_for_names() -> None:
    async with site(sized(b"x")) as server:
        fetching = Fetcher(limits(retries=1))
        assert await fetching.fetch(server.url("localhost"), PARAM) == b"x"
        assert await fetching.fetch(server.url("127.0.0.1"), PARAM) == b"x"
        await fetching.close()


async def test_only_allowed_hosts_are_fetched_from(dials: Dials) -> None:
    allowed = ("Media.example.org", "b\u00fccher.example", "2606:4700::1111")
    async with site(sized(b"x")) as server, fetcher(PUBLIC, allowed_hosts=allowed) as fetching:
        for host in ("media.example.org", "MEDIA.EXAMPLE.ORG", "b\u00fccher.example", "xn--bcher-kva.example"):
            assert await fetching.fetch(server.url(host), PARAM) == b"x"
        for host in ("example.org", "a.media.example.org", "media.example.org.evil.net", "93.184.216.34"):
            error = await refused(fetching.fetch(server.url(host), PARAM), "url_forbidden")
            assert "Media" not in error.message and "xn--" not in error.message
    assert len(dials.addresses) == 4


async def test_an_allowed_host_still_has_to_be_public(dials: Dials) -> None:
    async with fetcher("10.0.0.1", allowed_hosts=(HOST,), allow_private=False) as fetching:
        await refused(fetching.fetch(f"http://{HOST}/", PARAM), "url_forbidden")
    assert not dials.addresses


@pytest.mark.parametrize("host", ["", "*.example.org", "https://example.org", "example.org:443", "127.1", "a b"])
def test_an_allowed_host_that_is_none_is_a_fault_of_the_configuration(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed host"):
        Fetcher(limits(allowed_hosts=(host,)), ssl_context=TRUSTING_NONE)


@settings(max_examples=100, deadline=None)
@given(url=st.one_of(st.text(), st.text().map("http://{}".format), st.text("0x7f.:[]%@/\\#a1").map("http://{}".format)))
async def test_no_text_leads_to_a_private_address(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await INSIDE.fetch(url, PARAM)
    assert caught.value.code in ("url_not_supported", "url_forbidden")


async def _inside(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


INSIDE = Fetcher(limits(allow_private=False), resolve=_inside, ssl_context=TRUSTING_NONE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key, signed by itself, of both hosts."""
    folder = tmp_path_factory.mktemp("certificate")
    paths = folder / "certificate.pem", folder / "key.pem"
    if importlib.util.find_spec("cryptography"):
        _certify(*paths)
    elif shutil.which("openssl"):
        _certify_by_command(*paths)
    else:
        pytest.skip("neither the cryptography package nor openssl is here to make a certificate")
    return paths


def _certify(certificate: Path, key: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST), x509.DNSName(OTHER_HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def _certify_by_command(certificate: Path, key: Path) -> None:
    names = f"subjectAltName=DNS:{HOST},DNS:{OTHER_HOST}"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(
        ["openssl", "req", *made, *files, "-subj", f"/CN={HOST}", "-addext", names], check=True, capture_output=True
    )


@pytest.fixture
def tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    """The server's side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


@pytest.fixture
def asked_names(tls: ssl.SSLContext) -> list[str | None]:
    """Host names that clients sent by SNI, one a handshake."""
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    return names


@pytest.fixture
def trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


async def test_a_self_signed_certificate_is_refused_whatever_the_environment_trusts(
    tls: ssl.SSLContext, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    async with site(sized(b"x"), tls) as server, fetcher(ssl_context=None) as fetching:
        error = await refused(fetching.fetch(server.url(scheme="https"), PARAM), "fetch_failed")
    assert not server.heads and "certificate" in error.message


async def test_tls_is_for_the_host_while_the_connection_goes_to_the_address(
    tls: ssl.SSLContext, asked_names: list[str | None], trusting: ssl.SSLContext, dials: Dials
) -> None:
    async with site(sized(b"x"), tls) as server, fetcher("127.0.0.1", ssl_context=trusting) as fetching:
        assert await fetching.fetch(server.url(scheme="https"), PARAM) == b"x"
    assert asked_names == [HOST] and dials.addresses == ["127.0.0.1"]


async def test_a_trusted_certificate_of_another_host_is_refused(tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    async with site(sized(b"x"), tls) as server, fetcher(ssl_context=trusting) as fetching:
        await refused(fetching.fetch(server.url("third.example.org", "https"), PARAM), "fetch_failed")
        await refused(fetching.fetch(server.url("127.0.0.1", "https"), PARAM), "fetch_failed")
    assert not server.heads


async def test_hosts_of_one_address_do_not_share_a_connection(
    tls: ssl.SSLContext, asked_names: list[str | None], trusting: ssl.SSLContext
) -> None:
    async def keep_alive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(b"x", "Connection: keep-alive"))
        await reader.read()

    async with site(keep_alive, tls) as server, fetcher(ssl_context=trusting) as fetching:
        for host in (HOST, OTHER_HOST, HOST):
            assert await fetching.fetch(server.url(host, "https"), PARAM) == b"x"
    assert asked_names == [HOST, OTHER_HOST, HOST] and len(server.heads) == 3


async def test_an_endless_head_over_tls_is_given_up(tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    async with site(endless_hints, tls) as server, fetcher(ssl_context=trusting) as fetching:
        error = await refused(fetching.fetch(server.url(scheme="https"), PARAM), "fetch_failed")
    assert "before the file" in error.message
