"""What the OpenAI SDK asks, and how its answers are read."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.http_app import MODEL

SAMPLE_RATE_HZ = 24_000


CODES = 96
"""Of a short answer: more than a stream's first piece, so that there are several."""


QUESTION = [{"role": "user", "content": "Tell me."}]


Samples = NDArray[np.int16]


def spoken(audio_format: str, *, seed: int = 3, codes: int = CODES) -> dict[str, Any]:
    """What a client adds for an answer that is heard, of exactly so many codes."""
    return {
        "model": MODEL,
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": audio_format},
        "max_tokens": 8,
        "seed": seed,
        "extra_body": {"stage_sampling_params": {"talker": {"max_tokens": codes, "min_tokens": codes}}},
    }


def wav_samples(data: bytes) -> Samples:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE_HZ, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def whole_samples(client: OpenAI, **options: Any) -> Samples:
    audio = client.chat.completions.create(**spoken("wav", **options)).choices[0].message.audio
    assert audio is not None
    return wav_samples(base64.b64decode(audio.data))


def audio_delta(chunk: ChatCompletionChunk) -> dict[str, Any]:
    """The chunk's `delta.audio` as it was sent: SDKs before it had a type of its own leave it a dict."""
    return chunk.choices[0].delta.to_dict().get("audio", {}) if chunk.choices else {}


def streamed_pieces(client: OpenAI, **options: Any) -> list[Samples]:
    stream = client.chat.completions.create(**spoken("pcm16", **options), stream=True)
    sent = [audio_delta(chunk).get("data") for chunk in stream]
    return [np.frombuffer(base64.b64decode(data), "<i2") for data in sent if data]
