"""What the terminal asks a server for, by HTTP. All that goes wrong is one sentence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from omni_cluster.api_client import (
    CONNECT_TIMEOUT_S,
    BadAnswer,
    Part,
    Refused,
    ServedModel,
    body_of,
    events_of,
    refusal,
)
from omni_cluster.types.errors import OmniError

ANSWER_S = 600.0
"""Of silence within an answer; the server's own limit of a request is no longer, unless it is set so."""
_KEY: Final = re.compile(r"[!-~]+")


class TerminalError(OmniError):
    """What the user asked for cannot be done: one sentence."""


class Server:
    """One server. A context manager: leaving it closes the connections."""

    def __init__(self, url: str, key_file: Path | None) -> None:
        """Raises TerminalError."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {_key_of(key_file)}"} if key_file is not None else {}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_TIMEOUT_S)
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers)
        except (httpx.InvalidURL, ValueError):
            raise TerminalError(f"the URL {url!r} is none; use one such as http://127.0.0.1:8000.") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model(self) -> ServedModel:
        """The one that is served. Raises TerminalError, as all of these do."""
        body = body_of(self.text("/v1/models"))
        try:
            return ServedModel.of(body)
        except (LookupError, TypeError):
            raise TerminalError(f"{self.url} lists no models; --url names another server.") from None

    def voices(self) -> list[str]:
        return [str(name) for name in body_of(self.text("/v1/audio/voices")).get("names", ())]

    def text(self, path: str) -> str:
        """What a path answers; `/ready` also while the server is not."""
        with self._told():
            response = self._http.get(path)
            if response.status_code != httpx.codes.OK and path != "/ready":
                raise refusal(response.status_code, response.content)
            return response.text

    def answer(self, body: Mapping[str, Any]) -> Generator[Part, None, None]:
        """The parts of a streamed answer, as they come; closing it ends the request."""
        with self._told(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise refusal(response.status_code, response.read())
            for event in events_of(response.iter_lines()):
                yield Part.of(event)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            raise TerminalError(f"the server says: {refused}") from None
        except BadAnswer as bad:
            raise TerminalError(f"{str(bad).removesuffix('.')}; is there a server of this API at {self.url}?") from None
        except httpx.UnsupportedProtocol:
            raise TerminalError(f"the URL {self.url!r} is none; use one such as http://127.0.0.1:8000.") from None
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise TerminalError(f"{self.url} does not answer ({why}); --url names another server.") from None


def _key_of(file: Path) -> str:
    """The first key of a file. Raises TerminalError."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise TerminalError(f"the key file {file} cannot be read ({error}); name a text file.") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise TerminalError(f"the key file {file} has no key; put one on a line.")
    if not _KEY.fullmatch(keys[0]):  # no header can carry it, and what refuses the header would show it
        raise TerminalError(f"the first key of {file} is none; use printable ASCII without spaces.")
    return keys[0]
