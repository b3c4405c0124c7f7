"""Clients that ask without pause: most read to the end, some slowly, some leave, some ask what is refused."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import random
import time
import wave
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import httpx
import numpy as np

from omni_cluster.api_client import BadAnswer, Refused, refusal
from omni_cluster.openai_api.access import REQUEST_ID_HEADER
from tests.chaos.cases import REALTIME, SPEECH, Case
from tests.chaos.told import Told
from tests.chaos.voice import ask_by_voice

LEAST_DB = 45.0
"""A streamed sound's likeness to the whole one, which is what the project states of streams."""
LEAVES, READS_SLOWLY, IS_REFUSED = 0.2, 0.1, 0.05
MOST_EVENTS_BEFORE_LEAVING = 30
PAUSE_S = 0.2
"""Of a slow reader, after each event."""
PATIENCE_S = 600.0
MOST_ATTEMPTS = 5
"""Of a request whose connection ends with its ingress."""
RETRY_S = 1.0
"""Until a client asks again, and again as long for each time that it has."""
NOTICED_S = 10.0
"""Until Serve's proxy sends nobody to an ingress that has ended."""
SAMPLES_A_CODE = 480
SHOWN_CHARS = 60

How = Literal["exact", "differs", "lost", "left", "refused", "cut"]
WRONG: tuple[How, ...] = ("differs", "lost")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    case: str
    how: How
    why: str = ""
    longest_pause_s: float = 0.0
    request_id: str = ""


class Left(Exception):
    """The client has gone, as it meant to."""


async def ask_at_once(http: httpx.AsyncClient, case: Case) -> Told:
    """What a case comes to that is not read as it comes. Raises BadAnswer, OSError and httpx's errors."""
    if case.path == REALTIME:
        return await ask_by_voice(str(http.base_url).rstrip("/"), PATIENCE_S)
    return await ask_whole(http, case)


async def ask_whole(http: httpx.AsyncClient, case: Case) -> Told:
    """Raises BadAnswer and httpx's errors."""
    answer = await http.post(case.path, json=case.whole())
    if answer.status_code != 200:
        raise refusal(answer.status_code, answer.content)
    told = _told_by(answer, case)
    told.request_id = answer.headers.get(REQUEST_ID_HEADER, "")
    return told


def _told_by(answer: httpx.Response, case: Case) -> Told:
    if case.path == SPEECH:
        return Told(sound=_of_wav(answer.content))
    message = answer.json()["choices"][0]["message"]
    spoken = message.get("audio")
    if spoken is None:
        return Told(message["content"])
    return Told(message.get("content") or spoken["transcript"], _of_wav(base64.b64decode(spoken["data"])))


async def ask_streamed(
    http: httpx.AsyncClient, case: Case, *, leaves_after: int | None = None, pause_s: float = 0.0
) -> Told:
    """Raises Left once so many events have come, BadAnswer and httpx's errors."""
    told, sounds, last_s, events, began_s = Told(), [], 0.0, 0, time.monotonic()
    async with http.stream("POST", case.path, json=case.streamed()) as answer:
        if answer.status_code != 200:
            raise refusal(answer.status_code, await answer.aread())
        told.request_id = answer.headers.get(REQUEST_ID_HEADER, "")
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise Refused(str(event["error"]))
            now_s = time.monotonic()
            told.longest_pause_s = max(told.longest_pause_s, now_s - last_s if last_s else 0.0)
            text, sound = _said(event)
            told.heard(text, sound, now_s - began_s)
            sounds.append(sound)
            if event.get("type") == "speech.audio.done":
                break
            events += 1
            if leaves_after is not None and events >= leaves_after:
                raise Left
            await asyncio.sleep(pause_s)
            last_s = time.monotonic()
        else:
            raise BadAnswer("the stream ended without its end.")
    told.sound = np.frombuffer(b"".join(sounds), np.int16)
    return told


def _said(event: Mapping[str, Any]) -> tuple[str, bytes]:
    if event.get("type") == "speech.audio.delta":
        return "", base64.b64decode(event["audio"])
    delta = event["choices"][0]["delta"] if event.get("choices") else {}
    return delta.get("content") or "", base64.b64decode((delta.get("audio") or {}).get("data") or "")


def _of_wav(data: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(data)) as reader:
        return np.frombuffer(reader.readframes(reader.getnframes()), np.int16)


def difference(told: Told, expected: Told) -> str:
    """What differs and from where on, in words; empty where nothing does."""
    if told.text != expected.text:
        alike = (one == other for one, other in zip(told.text, expected.text, strict=False))
        at = sum(takewhile(bool, alike))
        said, meant = (text[at : at + SHOWN_CHARS] for text in (told.text, expected.text))
        return f"text from character {at} of {len(expected.text)} on: {said!r} in place of {meant!r}"
    if len(told.sound) != len(expected.sound):
        return f"{len(told.sound)} samples in place of {len(expected.sound)}"
    if (db := likeness_db(told.sound, expected.sound)) < LEAST_DB:
        codes = len(expected.sound) // SAMPLES_A_CODE
        return f"sound at {db:.1f} dB, from code {first_unlike_code(told.sound, expected.sound)} of {codes} on"
    return ""


def first_unlike_code(sound: np.ndarray, expected: np.ndarray) -> int:
    """Where an error begins that would, all along, be more than `LEAST_DB` allows."""
    allowed = np.mean(expected.astype(float) ** 2) / 10 ** (LEAST_DB / 10)
    squares = (expected.astype(float) - sound) ** 2
    means = [squares[i : i + SAMPLES_A_CODE].mean() for i in range(0, len(squares), SAMPLES_A_CODE)]
    return int(np.argmax(np.array(means) > allowed))


def likeness_db(sound: np.ndarray, expected: np.ndarray) -> float:
    """Signal to difference, in decibels; infinite for equal sounds."""
    signal, error = expected.astype(float), expected.astype(float) - sound
    if not error.any():
        return float("inf")
    return float(10 * np.log10((signal**2).sum() / (error**2).sum()))


class Clients:
    """So many at once, each with choices of its own that the seed decides.

    `has_cut`: whether an ingress was ended since a time. Its connections end with it: who had one asks again.
    """

    def __init__(
        self,
        url: str,
        asked: Sequence[Case],
        bad: Sequence[Case],
        expected: Mapping[str, Told],
        has_cut: Callable[[float], bool],
        *,
        seed: int,
    ) -> None:
        self._url = url
        self._has_cut = has_cut
        self._asked, self._bad = asked, bad
        self._expected = expected
        self._seed = seed
        self.outcomes: list[Outcome] = []

    async def run(self, count: int, until_s: float) -> None:
        """Requests that are under way at `until_s`, on the monotonic clock, are read to their end."""
        http = httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, trust_env=False, limits=NO_LIMITS)
        async with http, asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._one_after_another(http, random.Random(f"{self._seed} {number}"), until_s))

    async def _one_after_another(self, http: httpx.AsyncClient, chance: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            if chance.random() < IS_REFUSED:
                asked = functools.partial(self._refused, http, chance.choice(self._bad))
            else:
                asked = functools.partial(self._answered, http, chance.choice(self._asked), chance)
            self.outcomes.append(await self._again_where_cut(asked))

    async def _again_where_cut(self, asked: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """As SDKs do. The attempts that were cut are told too."""
        for attempt in range(1, MOST_ATTEMPTS):
            if (outcome := await asked()).how != "cut":
                return outcome
            self.outcomes.append(outcome)
            await asyncio.sleep(RETRY_S * attempt)
        outcome = await asked()
        return replace(outcome, how="lost") if outcome.how == "cut" else outcome

    async def _refused(self, http: httpx.AsyncClient, case: Case) -> Outcome:
        began_s = time.monotonic()
        try:
            answer = await http.post(case.path, json=case.whole())
        except httpx.HTTPError as error:
            return self._ended(case, error, began_s)
        if answer.status_code == 400:
            return Outcome(case.name, "refused")
        return self._ended(case, refusal(answer.status_code, answer.content), began_s)

    def _ended(self, case: Case, error: Exception, began_s: float) -> Outcome:
        """A request without its answer: cut, if an ingress was ended and none of ours said a word, else lost."""
        is_cut = not isinstance(error, Refused) and self._has_cut(began_s - NOTICED_S)
        return Outcome(case.name, "cut" if is_cut else "lost", f"{type(error).__name__}: {error}"[:300])

    async def _answered(self, http: httpx.AsyncClient, case: Case, chance: random.Random) -> Outcome:
        leaves = chance.random() < LEAVES
        leaves_after = chance.randint(1, MOST_EVENTS_BEFORE_LEAVING) if leaves else None
        pause_s = PAUSE_S if chance.random() < READS_SLOWLY else 0.0
        began_s = time.monotonic()
        try:
            if case.is_whole:
                told = await ask_at_once(http, case)
            else:
                told = await ask_streamed(http, case, leaves_after=leaves_after, pause_s=pause_s)
        except Left:
            return Outcome(case.name, "left")
        except (BadAnswer, OSError, httpx.HTTPError) as error:
            return self._ended(case, error, began_s)
        differs = difference(told, self._expected[case.name])
        how: How = "differs" if differs else "exact"
        return Outcome(case.name, how, differs[:300], told.longest_pause_s, told.request_id)


NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection each: one to an ingress replica lives as long as its request."""
