"""The client's sound, until it is committed: by the client, or where its turn ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime.items import new_id
from omni_cluster.openai_api.realtime.session import Format, SemanticVad, ServerVad
from omni_cluster.openai_api.realtime.sound import HEARD_HZ, Hearing, s16_of
from omni_cluster.server.realtime.voice_activity import (
    STARTS_AFTER,
    WINDOW,
    SpeechStream,
    TurnDetector,
    speech_model,
)

LEAST_MS: Final = 100
USUAL_PADDING_MS: Final = 300


@dataclass(frozen=True)
class SpeechStarted:
    """`item_id`: of the item that the turn will be; milliseconds are of all sound since the session began."""

    item_id: str
    start_ms: int


@dataclass(frozen=True, eq=False)
class SpeechPaused:
    """The turn may be over. `samples`: what it then is, float32 `[n]` at 16 kHz."""

    item_id: str
    samples: npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpeechResumed:
    """It is not over."""


@dataclass(frozen=True, eq=False)
class SpeechStopped:
    """`samples`: the turn, float32 `[n]` at 16 kHz, with its padding; of one that paused the same as then."""

    item_id: str
    end_ms: int
    samples: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Silence:
    """`samples`: the last of it, float32 `[n]` at 16 kHz, as an item."""

    item_id: str
    start_ms: int
    end_ms: int
    samples: npt.NDArray[np.float32]


Turn = SpeechStarted | SpeechPaused | SpeechResumed | SpeechStopped


class _Kept:
    """Samples in a row, as they came; `start` is the position of the first."""

    def __init__(self) -> None:
        self._pieces: deque[npt.NDArray[np.float32]] = deque()
        self.start = self.end = 0

    def push(self, samples: npt.NDArray[np.float32]) -> None:
        self._pieces.append(samples)
        self.end += len(samples)

    def forget(self, before: int) -> None:
        """All before a position."""
        while self._pieces and self.start < before:
            piece = self._pieces.popleft()
            gone = min(len(piece), before - self.start)
            self.start += gone
            if gone < len(piece):
                self._pieces.appendleft(piece[gone:])

    def until(self, end: int) -> npt.NDArray[np.float32]:
        """Those before a position, and no memory of what is behind it."""
        left, parts = end - self.start, [np.zeros(0, np.float32)]
        for piece in self._pieces:
            parts.append(piece[: max(0, left)])
            left -= len(piece)
        return np.concatenate(parts)


class InputBuffer:
    """Sound as the model hears it. Positions count samples at 16 kHz since the session began."""

    def __init__(self, sound: Format, detection: ServerVad | SemanticVad | None, most: int) -> None:
        """`most`: samples of an item."""
        self._most = most
        self._kept = _Kept()
        self.configure(sound, detection)

    def configure(self, sound: Format, detection: ServerVad | SemanticVad | None) -> None:
        """From now on the sound comes so, and turns are found so; what is held stays."""
        self._sound, self._hearing = sound, Hearing(sound)
        self._detector = None if detection is None else TurnDetector(detection)
        padding_ms = detection.prefix_padding_ms if isinstance(detection, ServerVad) else USUAL_PADDING_MS
        self._padding = padding_ms * HEARD_HZ // 1000
        self._restart()

    def _restart(self) -> None:
        """A turn that had begun is none."""
        self._item_id = new_id("item")
        self._paused: npt.NDArray[np.float32] | None = None
        self._seen = self._kept.end
        self._stream = None if self._detector is None else SpeechStream(speech_model())
        if self._detector is not None:
            self._detector.reset()

    @property
    def is_speaking(self) -> bool:
        """Whether a turn has begun and is not over."""
        return self._detector is not None and self._detector.is_speaking

    def push(self, data: bytes) -> list[Turn]:
        """Returns what it changes. Raises BadRequest for half a sample, and for more sound than an item may have."""
        values = s16_of(data, self._sound, "audio")
        if self._detector is None or self._stream is None:
            self._check_room(len(values) * HEARD_HZ // self._sound.sample_rate_hz)
            self._kept.push(self._hearing.push(values))
            return []
        samples = self._hearing.push(values)
        self._kept.push(samples)
        turns = list(self._turns(self._detector, self._stream, samples))
        if not self._detector.is_speaking:
            self._kept.forget(self._seen - (STARTS_AFTER - 1) * WINDOW - self._padding)
        return turns

    def _check_room(self, further: int) -> None:
        if self._kept.end - self._kept.start + further > self._most:
            raise BadRequest(
                f"The buffer would hold more than {self._most / HEARD_HZ:g} s of sound, which is the most of an item; "
                "commit it, or clear it.",
                param="audio",
                code="audio_too_long",
            )

    def _turns(self, detector: TurnDetector, stream: SpeechStream, samples: npt.NDArray[np.float32]) -> Iterator[Turn]:
        for likelihood in stream.push(samples):
            self._seen += WINDOW
            change = detector.push(likelihood)
            if change == "started":
                self._kept.forget(self._seen - STARTS_AFTER * WINDOW - self._padding)
                yield SpeechStarted(self._item_id, _ms(self._kept.start))
            elif change == "paused":
                self._paused = self._kept.until(self._seen)
                yield SpeechPaused(self._item_id, self._paused)
            elif change == "resumed":
                self._paused = None
                yield SpeechResumed()
            elif change == "stopped" or (detector.is_speaking and not self._has_room_for_a_window):
                yield self._stopped(detector)

    @property
    def _has_room_for_a_window(self) -> bool:
        """A turn begins on no window's bound, because of its padding."""
        return self._seen + WINDOW - self._kept.start <= self._most

    def _stopped(self, detector: TurnDetector) -> SpeechStopped:
        """A turn that is as long as an item may be ends too."""
        detector.reset()
        turn = self._kept.until(self._seen) if self._paused is None else self._paused
        stopped = SpeechStopped(self._item_id, _ms(self._seen), turn)
        self._item_id, self._paused = new_id("item"), None
        self._kept.forget(self._seen)
        return stopped

    def commit(self) -> tuple[str, npt.NDArray[np.float32]]:
        """An item's id and all sound, float32 `[samples]` at 16 kHz; none is left. Raises BadRequest for too little."""
        held_ms = (self._kept.end - self._kept.start) * 1000 / HEARD_HZ
        if held_ms < LEAST_MS:
            raise BadRequest(
                f"Error committing input audio buffer: buffer too small. Expected at least {LEAST_MS}ms of audio, but "
                f"buffer only has {held_ms:.2f}ms of audio.",
                code="input_audio_buffer_commit_empty",
            )
        self._kept.push(self._hearing.flush())  # a millisecond that was not counted: the item may have no room for it
        item_id, samples = self._item_id, self._kept.until(min(self._kept.end, self._kept.start + self._most))
        self.clear()
        return item_id, samples

    def silence(self) -> Silence:
        """What came since the last turn, as far as it is kept, and no less than an item may have; none is left."""
        item_id, start, end = self._item_id, self._kept.start, self._kept.end
        samples = self._kept.until(end)
        missing = max(0, LEAST_MS * HEARD_HZ // 1000 - len(samples))
        self.clear()
        return Silence(item_id, _ms(start), _ms(end), np.pad(samples, (missing, 0)))

    def clear(self) -> None:
        """Forgets all sound, and a turn that had begun."""
        self._kept.forget(self._kept.end)
        self._hearing = Hearing(self._sound)
        self._restart()


def _ms(position: int) -> int:
    return position * 1000 // HEARD_HZ
