"""What a client of the HTTP API reads: the lines of a stream, what an event brings, and refusals."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_cluster.types.errors import OmniError

Event = dict[str, Any]

CONNECT_TIMEOUT_S = 10.0
DONE = "[DONE]"


class BadAnswer(OmniError):
    """What came is no answer, or no whole one: one sentence."""


class Refused(BadAnswer):
    """The server's own sentence, and its `code` if it gave one."""

    def __init__(self, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a server lists first.

    `sample_rate_hz`: of its sound, which raw is 16-bit and mono; `codes_per_s`: codec tokens of a second of it; both 0
    for a model without sound. `stages`: names of stages, by what they make.
    """

    name: str
    sample_rate_hz: int = 0
    codes_per_s: float = 0.0
    stages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ServedModel:
        """What `GET /v1/models` answers. Raises LookupError or TypeError for what is no list of models."""
        model = body["data"][0]
        sound = model.get("sound") or {}
        rates = int(sound.get("sample_rate_hz", 0)), float(sound.get("codes_per_s", 0.0))
        return cls(str(model["id"]), *rates, dict(model.get("stages") or {}))


@dataclass(frozen=True, slots=True)
class Part:
    """What an event of a stream, or the body of a whole answer, brings. `sound` is in the format asked for."""

    text: str
    sound: bytes
    stages: Mapping[str, Mapping[str, float]]
    usage: Mapping[str, Any]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Part:
        choice = event["choices"][0] if event.get("choices") else {}
        delta = choice.get("delta") or choice.get("message") or {}
        return cls(
            text=_text_of(delta.get("content")),
            sound=base64.b64decode((delta.get("audio") or {}).get("data") or ""),
            stages=(event.get("omni") or {}).get("stages") or {},
            usage=event.get("usage") or {},
        )


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Of a list of parts, those that are text: beside them are pictures."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def events_of(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a stream until [DONE]. Raises BadAnswer for an error event, and for a stream that breaks off."""
    for line in lines:
        if (data := _data(line)) == DONE:
            return
        if data is not None:
            yield body_of(data)
    raise _broken_off()


async def events_of_async(lines: AsyncIterable[str]) -> AsyncIterator[Event]:
    """As `events_of`, of lines that are waited for."""
    async for line in lines:
        if (data := _data(line)) == DONE:
            return
        if data is not None:
            yield body_of(data)
    raise _broken_off()


def _data(line: str) -> str | None:
    """What a line says, None for one that says nothing."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None


def _broken_off() -> BadAnswer:
    return BadAnswer("the stream ended without [DONE].")


def body_of(text: str | bytes) -> Event:
    """A JSON object of the server. Raises BadAnswer for what is none, and Refused for one that is an error."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadAnswer(f"the server sent {text[:60]!r}, which is no JSON object.")
    if "error" in body:
        raise Refused(_sentence(body["error"]), _code(body["error"]))
    return body


def refusal(status: int, content: bytes) -> BadAnswer:
    """The server's own sentence, or its status and first words when it gave none."""
    try:
        body_of(content)
    except Refused as refused:
        return refused
    except BadAnswer:
        pass
    return BadAnswer(f"the server answered {status}: {content[:80].decode(errors='replace')!r}.")


def _sentence(error: object) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _code(error: object) -> str | None:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def printable(text: str) -> str:
    """For a terminal, which would obey some of the characters that a model may say."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
