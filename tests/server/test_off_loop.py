"""Work off the event loop: the loop goes on meanwhile, and what the work uses is not closed under it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.encoding import SoundFormat, encode
from omni_cluster.openai_api.speech import SpeechRequest, parse_speech_request
from omni_cluster.server.endpoints import chat, speech
from omni_cluster.server.off_loop import OffLoop
from omni_cluster.server.sound_file import coded
from omni_cluster.server.streamed import AnswerStream
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.configs import TINY_CONFIG
from tests.server.speaker import face_of

RATE_HZ = 24_000
PATIENCE_S = 60


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


async def test_what_a_call_uses_is_closed_when_it_returns_and_not_before(threads: ThreadPoolExecutor) -> None:
    begun, may_end = threading.Event(), threading.Event()
    told: list[str] = []

    def work() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)
        told.append("worked")

    closed = threading.Event()
    off_loop = OffLoop(threads, lambda: (told.append("closed"), closed.set())[0])
    running = asyncio.create_task(off_loop.run(work))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    running.cancel()  # the client has left
    with pytest.raises(asyncio.CancelledError):
        await running
    off_loop.close()
    assert told == []
    may_end.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE_S)
    assert told == ["worked", "closed"]


async def test_what_was_never_begun_is_closed_at_once(threads: ThreadPoolExecutor) -> None:
    told: list[str] = []
    OffLoop(threads, lambda: told.append("closed")).close()
    assert told == ["closed"]


def spoken(sound_format: str) -> SpeechRequest:
    body = (
        f'{{"model": "m", "input": "Hi.", "voice": "a", "response_format": "{sound_format}", "stream_format": "audio"}}'
    )
    return parse_speech_request(body.encode(), models=["m"], voices=["a"])


def said(samples: np.ndarray, pieces: int) -> AnswerStream[AnswerProgress]:
    async def events() -> AsyncGenerator[StageEvent, None]:
        start = 0
        for piece in np.array_split(samples, pieces):
            yield StageEvent("code2wav", StageChunk(audio=AudioChunk(start, piece, RATE_HZ)))
            start += piece.size

    return AnswerStream(events(), AnswerProgress({"code2wav": "audio"}))


@contextlib.contextmanager
def occupied(threads: ThreadPoolExecutor) -> Iterator[None]:
    """Both threads have other work until the context is left."""
    may_end = threading.Event()
    works = [threads.submit(may_end.wait, PATIENCE_S) for _ in range(2)]
    try:
        yield
    finally:
        may_end.set()
    assert all(work.result() for work in works)


@pytest.mark.parametrize("sound_format", ["mp3", "opus", "flac", "aac"])
async def test_sound_is_coded_by_the_threads_and_not_on_the_loop(
    threads: ThreadPoolExecutor, sound_format: SoundFormat
) -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 15 * RATE_HZ).astype(np.float32)
    pieces = coded(spoken(sound_format), said(samples, 3), threads)
    with occupied(threads):
        first = asyncio.ensure_future(anext(pieces))
        for _ in range(100):
            await asyncio.sleep(0)  # a turn of the loop, which coded the piece were it done there
        assert not first.done()
    sound = await first + b"".join([piece async for piece in pieces])
    if sound_format == "mp3":
        assert abs(len(sound) - len(encode(samples, RATE_HZ, "mp3"))) < 2_000


async def test_whole_answers_and_pieces_of_sound_are_made_by_threads(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coding and, of a whole answer, its JSON, as the endpoints do it."""
    made: dict[str, int] = {}

    def watched(of: object, name: str) -> None:
        work = getattr(of, name)

        def watching(*args: Any, **kwargs: Any) -> Any:
            made[f"{of} {name}"] = threading.get_ident()
            return work(*args, **kwargs)

        monkeypatch.setattr(of, name, watching)

    for of, name in (
        (chat, "whole_sound"),
        (chat, "completion"),
        (chat.JSONResponse, "render"),
        (chat.StreamedSound, "push"),
        (speech, "whole_sound"),
    ):
        watched(of, name)
    sound: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "mp3"}}
    async with face_of(load_config(TINY_CONFIG, known_families=known_families())) as face:
        answers = [await face.chat(**sound), await face.chat(**sound, stream=True), await face.speech()]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(made) == 5 and threading.get_ident() not in made.values(), made
