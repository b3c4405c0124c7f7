"""The stream of `/v1/audio/speech`: the sound of a text as it is made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.encoding import SoundEncoder, SoundFormat, is_quick
from omni_cluster.openai_api.speech import SpeechRequest, delta_event, done_event
from omni_cluster.server.answers import finish_reason, whole_sound
from omni_cluster.server.off_loop import OffLoop
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.streamed import AnswerStream
from omni_cluster.types.outputs import AudioChunk


async def spoken_sound(
    spoken: SpeechRequest, answer: AnswerStream[AnswerProgress], threads: ThreadPoolExecutor
) -> AsyncIterator[bytes]:
    """The body of the answer: raw bytes of one file, or server-sent events with its pieces; coded in `threads`.

    What breaks after the first byte is an event; raw bytes just end, which cuts the connection off.
    """
    as_events = spoken.stream_format == "sse"
    try:
        async with contextlib.aclosing(coded(spoken, answer, threads)) as pieces:
            async for piece in pieces:
                yield sse.event(delta_event(piece)) if as_events else piece
        if as_events:
            counts = answer.progress.counts
            yield sse.event(done_event(counts.text, counts.codec, finish_reason(answer.progress)))
    except Exception as error:  # the boundary to the client, after the first byte
        last = sse.event(error_answer(error, "input")[1])  # logs it, too
        if not as_events:
            raise
        yield last


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
