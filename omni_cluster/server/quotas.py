"""What each API key may ask of this ingress in a minute: requests, and seconds of sound."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from omni_cluster.config.access import ApiConfig
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.types.outputs import AudioChunk

MINUTE_S: Final = 60.0
TOO_MANY: Final = 429
Clock = Callable[[], float]


class TokenBucket:
    """A token bucket of a minute's amount, refilled evenly. It may be overdrawn, and is refilled from there."""

    def __init__(self, per_minute: float, least: float, clock: Clock) -> None:
        """`least`: what it holds at least when it is full."""
        self._per_s = per_minute / MINUTE_S
        self._most = max(per_minute, least)
        self._level = self._most
        self._clock = clock
        self._at_s = clock()
        self._lock = threading.Lock()
        """Sound is asked for where prompts are rendered, off the event loop."""

    def take(self, amount: float) -> None:
        with self._lock:
            self._refill()
            self._level -= amount

    def give_back(self, amount: float) -> None:
        with self._lock:
            self._add(amount)

    def wait_s(self, amount: float) -> float:
        """Until it holds so much."""
        with self._lock:
            self._refill()
            return max(0.0, amount - self._level) / self._per_s

    def _refill(self) -> None:
        now_s = self._clock()
        self._add((now_s - self._at_s) * self._per_s)
        self._at_s = now_s

    def _add(self, amount: float) -> None:
        self._level = min(self._most, self._level + amount)


class Allowance:
    """What one key may still ask for. Sound is counted as it is made, and may overdraw its bucket."""

    def __init__(self, api: ApiConfig, ingresses: int, clock: Clock) -> None:
        self._requests_per_minute = api.requests_per_minute
        self._sound_s_per_minute = api.sound_seconds_per_minute
        self._requests = _share(api.requests_per_minute, ingresses, 1, clock)
        self._sound_s = _share(api.sound_seconds_per_minute, ingresses, 0, clock)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request, unless what is inside turns it away for want of room. Raises BadRequest, 429."""
        if self._requests is None:
            yield
            return
        if wait_s := self._requests.wait_s(1):
            raise _beyond(f"may send {self._requests_per_minute:g} requests a minute", wait_s)
        self._requests.take(1)
        try:
            yield
        except BadRequest as error:
            if error.status == TOO_MANY:
                self._requests.give_back(1)
            raise

    def check_sound(self) -> None:
        """Raises BadRequest, 429, for a key that had more sound than it may."""
        if self._sound_s is not None and (wait_s := self._sound_s.wait_s(0)):
            raise _beyond(f"may have {self._sound_s_per_minute:g} seconds of sound a minute", wait_s)

    def observe(self, event: StageEvent) -> None:
        """Counts the sound of a stream's event."""
        self.count_sound(event.chunk.audio)

    def count_sound(self, audio: AudioChunk | None) -> None:
        """Counts sound that was made."""
        if self._sound_s is not None and audio is not None:
            self._sound_s.take(len(audio.samples) / audio.sample_rate_hz)


class Quotas:
    """The allowance of each key. `ingresses` share what a key may ask for, each a part that it alone counts."""

    def __init__(self, api: ApiConfig, ingresses: int, clock: Clock = time.monotonic) -> None:
        self._api, self._ingresses, self._clock = api, ingresses, clock
        self._by_key: dict[bytes, Allowance] = {}

    def of(self, key: bytes) -> Allowance:
        """`key`: what the guard says of it; there are as many as the operator named."""
        if key not in self._by_key:
            self._by_key[key] = Allowance(self._api, self._ingresses, self._clock)
        return self._by_key[key]


def _share(per_minute: float | None, ingresses: int, least: float, clock: Clock) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute / ingresses, least, clock)


def _beyond(what: str, wait_s: float) -> BadRequest:
    return BadRequest(
        f"This API key {what}, which were used; send the request again in {math.ceil(wait_s)} s.",
        code="rate_limit_exceeded",
        status=TOO_MANY,
        retry_after_s=wait_s,
    )
