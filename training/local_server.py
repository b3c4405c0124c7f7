"""A server of one configuration in a process of its own, as `omni-cluster serve --local` is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx

from omni_cluster.bench.errors import BenchError

HOST: Final = "127.0.0.1"
START_S: Final = 600.0
END_S: Final = 60.0
LOOK_S: Final = 0.5
TOLD_LINES: Final = 3
"""Of what a server wrote that did not start."""


@contextlib.contextmanager
def serving(config: Path, log: Path) -> Iterator[str]:
    """The address of a server that is ready; what it prints goes to `log`. Raises BenchError if it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "omni_cluster", "serve", "--local", str(config), "--port", str(port)]
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    try:
        url = f"http://{HOST}:{port}"
        _wait_ready(server, url, log)
        yield url
    finally:
        _end(server)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while not _is_ready(url):
        if server.poll() is not None:
            last = " ".join(log.read_text(errors="replace").splitlines()[-TOLD_LINES:])
            raise BenchError(f"the server ended as it started, with exit code {server.returncode}: {last}")
        if time.monotonic() > ends_s:
            raise BenchError(f"the server was not ready after {START_S:.0f} s; {log} has what it wrote.")
        time.sleep(LOOK_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
