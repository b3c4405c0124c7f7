"""The sound of an answer as one file, written while it is made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.openai_api.encoding import SoundEncoder, SoundFormat, is_quick
from omni_cluster.openai_api.speech import SpeechRequest
from omni_cluster.server.answers import whole_sound
from omni_cluster.server.off_loop import OffLoop
from omni_cluster.server.streamed import AnswerStream
from omni_cluster.types.outputs import AudioChunk


async def coded(
    spoken: SpeechRequest, answer: AnswerStream[AnswerProgress], threads: ThreadPoolExecutor
) -> AsyncGenerator[bytes, None]:
    """The sound in the format asked for, piece by piece; a file without samples for no sound."""
    file = _SoundFile(spoken.format, spoken.sample_rate_hz)
    async with contextlib.aclosing(answer):
        with contextlib.closing(OffLoop(threads, file.close)) as off_loop:
            async for chunk in answer:
                if (audio := chunk.audio) is None:
                    continue
                quick = is_quick(spoken.format, audio.samples.size)
                if piece := file.push(audio) if quick else await off_loop.run(functools.partial(file.push, audio)):
                    yield piece
            if rest := await off_loop.run(file.finish):
                yield rest


class _SoundFile:
    """A file that begins with the first sound; one without samples where none came."""

    def __init__(self, sound_format: SoundFormat, sample_rate_hz: int) -> None:
        self._format: SoundFormat = sound_format
        self._sample_rate_hz = sample_rate_hz
        self._encoder: SoundEncoder | None = None

    def push(self, audio: AudioChunk) -> bytes:
        if self._encoder is None:
            self._encoder = SoundEncoder(audio.sample_rate_hz, self._format)
        return self._encoder.push(audio.samples)

    def finish(self) -> bytes:
        if self._encoder is None:
            return whole_sound(None, self._format, self._sample_rate_hz)
        return self._encoder.finish()

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
