"""A server of the client's own, started beside the script and asked by plain HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

START_S = 600


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(command: list[str], url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """The program, from when `url` answers until the block ends."""
    program = subprocess.Popen(command, env=dict(environment), stdout=sys.stderr, stderr=sys.stderr)
    try:
        _wait_for(url, program)
        yield
    finally:
        program.terminate()
        program.wait(30)


def _wait_for(url: str, program: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError as error:
            if program.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the program does not answer at {url}") from error
            time.sleep(0.2)


def posted(url: str, body: Any, headers: Mapping[str, str], content_type: str = "application/json") -> bytes:
    """The answer's body; an answer that is an error is raised with its body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return got(urllib.request.Request(url, data, {"Content-Type": content_type, **headers}))


def got(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode(errors='replace')}") from error
