"""Extreme but finite values, in media and in parameters: an answer or a sentence, and the same answers to others."""

from __future__ import annotations

import base64
import io
import struct
import wave
from typing import Any

import numpy as np
import pytest

from tests.http_app import chat
from tests.server.local import LocalApp

LOUD = [1e-45, 1e-30, 1.0, 32_768.0, 1e6, 1e12, 1e18, 1e30, 3e38]
EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 2, "top_p": 1e-300},
    {"temperature": 2, "top_p": 1e-6, "top_k": 2**31 - 1},
    {"temperature": 1e-6, "repetition_penalty": 0.01},
    {"temperature": 2, "repetition_penalty": 100},
    {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 100},
    {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0.01},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1, "seed": -(2**63)},
    {"temperature": 1, "seed": 2**63 - 1},
    {"min_tokens": 8, "stop_token_ids": list(range(64))},
]


def float_wav(seed: int, loudness: float) -> bytes:
    """A quarter of a second of noise, float32, at 16 kHz."""
    noise = np.random.RandomState(seed).uniform(-loudness, loudness, 4_000)
    samples = np.append(noise, loudness).astype("<f4").tobytes()
    layout = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + len(samples))
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + layout
        + (b"data" + struct.pack("<I", len(samples)) + samples)
    )


def said(local: LocalApp, number: int) -> str:
    answer = chat(local, f"Question {number}: what do you hear?", max_tokens=8)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


def heard(local: LocalApp, wav: bytes, **fields: Any) -> tuple[int, str]:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    answer = chat(local, [sound, {"type": "text", "text": "Repeat it."}], max_tokens=8, **fields)
    body = answer.json()
    return answer.status_code, body["error"]["code"] if "error" in body else body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("with_sound", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_loudness_changes_another_clients_answer(local: LocalApp, with_sound: bool) -> None:
    before = [said(local, i) for i in range(4)]
    fields = {"modalities": ["text", "audio"], "audio": {"format": "wav"}} if with_sound else {}
    for seed, loudness in enumerate(LOUD):
        status, told = heard(local, float_wav(seed, loudness), **fields)
        assert (status, told) == (400, "bad_audio") if loudness > 1e5 else status == 200, (loudness, status, told)
    assert [said(local, i) for i in range(4)] == before


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_no_parameter_changes_another_clients_answer(local: LocalApp, fields: dict[str, Any]) -> None:
    before = said(local, 0)
    stages = {"thinker": fields, "talker": {name: fields[name] for name in fields if name != "stop_token_ids"}}
    answer = chat(
        local, "Hi", max_tokens=12, stage_sampling_params=stages, modalities=["text", "audio"], audio={"format": "wav"}
    )
    assert answer.status_code == 200, answer.text
    with wave.open(io.BytesIO(base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"]))) as sound:
        assert sound.getnchannels() == 1
    assert said(local, 0) == before
