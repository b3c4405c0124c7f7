"""Errors, sampling and sound between the pipeline and the API."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from omni_cluster.cluster.answers import StreamedSound, error_answer, stage_sampling
from omni_cluster.config.loader import load_config
from omni_cluster.engine.fan_in import DeadlineExceeded
from omni_cluster.engine.outbox import OutboxFull
from omni_cluster.errors import RequestError
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.chat import ApiLimits, ChatRequest, parse_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.outputs import Pcm

LIMITS = ApiLimits(1 << 20, 2, 2, 1 << 20, 10.0, 1 << 20, 512)
CONFIG = load_config(known_families=known_families())


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat_request(json.dumps(body).encode(), models=["m"], voices=["a"], limits=LIMITS)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (BadRequest("too large", status=413), 413, "too large"),
        (RequestError("voice is 'x'"), 400, "voice is 'x'"),
        (DeadlineExceeded("took too long"), 504, "took too long"),
        (RayActorError(), 503, "send the request again"),
        (OutboxFull("its hand-over is full"), 500, "its hand-over is full"),
        (ZeroDivisionError("/secret/path"), 500, "its log has the cause"),
    ],
)
def test_each_error_has_its_status_and_a_sentence_that_gives_nothing_away(
    error: Exception, status: int, words: str
) -> None:
    answered, body = error_answer(error)
    assert answered == status
    assert words in body["error"]["message"]
    assert "/secret" not in json.dumps(body)


def test_sampling_goes_to_the_stage_that_makes_the_text() -> None:
    sampling = stage_sampling(chat(temperature=0.5, max_tokens=9, stop=["."]), CONFIG)
    assert sampling == {"thinker": {"temperature": 0.5, "max_tokens": 9, "stop": ["."]}, "talker": {}}


def test_a_seed_goes_to_every_stage_that_samples() -> None:
    assert stage_sampling(chat(seed=5), CONFIG) == {"thinker": {"seed": 5}, "talker": {"seed": 5}}


def pcm(start: int, count: int) -> Pcm:
    return Pcm(start, np.linspace(-0.5, 0.5, count, dtype=np.float32), 24_000)


def test_without_a_format_each_chunk_is_a_wav_file() -> None:
    sound = StreamedSound(None)
    for count in (100, 7):
        with wave.open(io.BytesIO(sound.push(pcm(0, count)))) as file:
            assert (file.getnframes(), file.getframerate()) == (count, 24_000)
    assert sound.flush() == b""


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_pieces_of_raw_sound_can_be_joined_in_base64(audio_format: str) -> None:
    sound = StreamedSound(audio_format)
    pieces = [sound.push(pcm(0, 100)), sound.push(pcm(100, 7)), sound.flush()]
    assert all(len(piece) % 6 == 0 for piece in pieces[:-1])
    joined = base64.b64decode("".join(base64.b64encode(p).decode() for p in pieces))
    expected = np.concatenate([pcm(0, 100).samples, pcm(0, 7).samples])
    np.testing.assert_allclose(np.frombuffer(joined, "<i2") / 32768, expected, atol=1 / 32768)
