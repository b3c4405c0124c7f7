"""What tests ask an application by HTTP, and what they expect of its answers."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from typing import Any, Protocol

import av
import httpx
import numpy as np
import pytest

from omni_cluster.openai_api.audio import wav_bytes
from omni_cluster.types.inputs import OmniRequest
from tests.codes import codes_of
from tests.reference import media
from tests.served.app import ServedApp
from tests.served.leftovers import KEPT

MODEL = "preset:tiny"


WAVE_TOLERANCE = 1e-4


STREAM_TOLERANCE = 2e-3
"""Between a streamed answer and the whole one: at the edge of a piece the vocoder sees an estimate of what follows."""


PCM16_STEP = 1 / 32768


class HttpApp(Protocol):
    """A server's client: of a cluster, or of a server in this process."""

    client: httpx.Client


def assert_equals_reference(output: Any, expected: Any) -> None:
    assert list(output.prompt_token_ids) == list(expected.prompt_ids)
    assert list(output.token_ids) == list(expected.token_ids)
    assert codes_of(output) == list(expected.codes)
    np.testing.assert_allclose(output.audio.samples, expected.waveform, atol=WAVE_TOLERANCE)


def assert_comes_in(audio_format: str, served: HttpApp, *, stream: bool) -> None:
    answer = chat(
        served, "Say it.", modalities=["text", "audio"], audio={"voice": "Chelsie", "format": audio_format},
        stream=stream, max_tokens=8, seed=3, stage_sampling_params={"talker": {"max_tokens": 200}},
    )  # fmt: skip
    if stream:
        pieces = sounds(events(answer))
        assert len(pieces) > 1 and all(len(base64.b64decode(piece)) % 6 == 0 for piece in pieces[:-1])
        codes = events(answer)[-1]["omni"]["stages"]["talker"]["tokens"]
    else:
        pieces = [answer.json()["choices"][0]["message"]["audio"]["data"]]
        codes = answer.json()["usage"]["completion_tokens_details"]["audio_tokens"]
    with av.open(io.BytesIO(base64.b64decode("".join(pieces)))) as container:
        decoded_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    assert decoded_s == pytest.approx(codes / 50, abs=0.1)  # a code is 20 ms; stop codes are no sound, mp3 is padded


def chat(served: HttpApp, content: Any, **options: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}
    return served.client.post("/v1/chat/completions", json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def sounds(streamed: list[dict[str, Any]]) -> list[str]:
    """The base64 texts of a stream's audio deltas."""
    audio = [choice["delta"].get("audio", {}) for event in streamed for choice in event["choices"]]
    return [a["data"] for a in audio if "data" in a]


def as_parts(kind: str) -> list[dict[str, Any]]:
    audios, images = media(kind)
    parts: list[dict[str, Any]] = []
    for audio in audios:
        data = base64.b64encode(wav_bytes(audio, 16_000)).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": "Hello world, describe it."}]


async def nothing_is_left(served: ServedApp) -> bool:
    return all(
        status["open_outboxes"] == status["held_bytes"] == 0
        and all(status["engine"].get(name, 0) == 0 for name in KEPT)
        for status in await served.statuses()
    )


async def talker_runs(served: ServedApp) -> bool:
    return any(s["engine"]["running"] for s in await served.statuses_of("talker"))


def with_lengths(request: OmniRequest, text_tokens: int, codes: int) -> OmniRequest:
    exact = {"thinker": text_tokens, "talker": codes}
    return dataclasses.replace(
        request, sampling={stage: {"max_tokens": n, "min_tokens": n} for stage, n in exact.items()}
    )
