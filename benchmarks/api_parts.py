"""What the API does to one streamed request besides waiting, part by part, by the functions that do it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from omni_cluster.api_client import ServedModel
from omni_cluster.bench.http_client import chat_body
from omni_cluster.bench.load import Load
from omni_cluster.bench.stats import percentiles
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.chat import AnswerFormat, ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.completion import ChatStream
from omni_cluster.server.answers import StreamedSound, stage_sampling
from omni_cluster.server.limits import api_limits
from omni_cluster.types.outputs import AudioChunk

MIN_REPETITIONS = 200
PIECE_S = 0.24
"""Of the first piece of a stream's sound."""
FORMATS: tuple[AnswerFormat, ...] = get_args(AnswerFormat)


@dataclass(frozen=True, slots=True)
class Part:
    """How long one part took, in `unit`. One more repetition than is told of comes first and is not counted."""

    name: str
    unit: str
    p50: float
    p99: float
    repetitions: int


def measured_parts(bound: BoundPipeline, load: Load, repetitions: int = MIN_REPETITIONS) -> list[Part]:
    """All parts, in the order in which a request meets them. Starts no engine."""
    bodies = [json.dumps(chat_body(served(bound), load, number)).encode() for number in range(repetitions + 1)]
    read = reader(bound)
    chats = [read(body) for body in bodies]
    stream = ChatStream(chats[0])
    piece = StreamedSound("pcm16").push(noise(PIECE_S))
    of_a_request = [
        part("parse and check", read, bodies),
        part("sampling of each stage", lambda chat: stage_sampling(chat, bound.config), chats),
        part("render", lambda chat: bound.family.render(chat.messages), chats),
        part("SSE event of a token's text", lambda text: sse.event(stream.text(text)), [" word"] * len(bodies)),
        part(f"SSE event of {PIECE_S:g} s of pcm16", lambda data: sse.event(stream.audio(data)), [piece] * len(bodies)),
    ]
    return of_a_request + [each for name in FORMATS for each in sound_parts(name, repetitions)]


def served(bound: BoundPipeline) -> ServedModel:
    """What a server would say of the model."""
    return ServedModel(bound.config.model, bound.sample_rate_hz, stages=dict(bound.family.makers()))


def reader(bound: BoundPipeline) -> Callable[[bytes], ChatRequest]:
    """Parses and checks a body as the ingress does."""
    limits, models, voices = api_limits(bound.config), [bound.config.model], bound.family.voices

    def read(body: bytes) -> ChatRequest:
        return open_chat_request(check_chat_request(body, models=models, voices=voices, limits=limits), {}, limits)

    return read


def sound_parts(audio_format: AnswerFormat, repetitions: int) -> Iterator[Part]:
    """A stream's first piece, for which its encoder is opened, and a second of sound in the middle of a stream."""

    def opened(audio: AudioChunk) -> StreamedSound:
        sound = StreamedSound(audio_format)
        sound.push(audio)
        return sound

    yield part(
        f"{audio_format}, first {PIECE_S:g} s", opened, [noise(PIECE_S)] * (repetitions + 1), StreamedSound.close
    )
    with contextlib.closing(opened(noise(PIECE_S))) as sound:
        yield part(audio_format, sound.push, [noise(1.0)] * (repetitions + 1), unit="ms/s of sound")


def part(
    name: str,
    action: Callable[[Any], Any],
    inputs: Iterable[Any],
    release: Callable[[Any], object] | None = None,
    *,
    unit: str = "ms",
) -> Part:
    """`action` on each input, then, untimed, `release` of what it made; the first warms up and is not counted."""
    times_ms = []
    for each in inputs:
        started_s = time.perf_counter()
        made = action(each)
        times_ms.append(1e3 * (time.perf_counter() - started_s))
        if release is not None:
            release(made)
    figures = percentiles(times_ms[1:])
    return Part(name, unit, figures.p50, figures.p99, len(times_ms) - 1)


def noise(seconds: float) -> AudioChunk:
    """Sound that no encoder can leave out: white noise at a tenth of full scale."""
    rate_hz = 24_000
    samples = np.random.default_rng(0).normal(0.0, 0.1, round(seconds * rate_hz)).astype(np.float32)
    return AudioChunk(0, samples, rate_hz)
