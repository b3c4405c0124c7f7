"""Qwen3-Omni behind HTTP: what transformers says, whole and in pieces, also when a replica of a stage is killed."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_cluster.models.qwen3_omni.checkpoint import embedded_checkpoint
from tests.http_app import PCM16_STEP, WAVE_TOLERANCE, as_parts, chat, events, sounds
from tests.models.qwen3_omni.thinker_reference import media_of, prompt_text
from tests.models.qwen3_omni.whole_reference import MAX_CODES, MAX_TOKENS, Reference
from tests.served.app import ROOT, ServedApp, serve_run
from tests.served.recovering import Moment, Recovering, kill_replica, much_sound, sound_begins

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
LENGTHS = {"max_tokens": MAX_TOKENS, "stage_sampling_params": {"talker": {"max_tokens": MAX_CODES}}}
SEED = 8
"""With some others, 7 among them, two codes of a frame are alike to float32: what computes a prefix anew may choose the
other one."""
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two replicas of each stage."""
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen3_omni_tiny.yaml").read_text())
    for stage in config["stages"]:
        stage["num_replicas"] = 2
    path = tmp_path_factory.mktemp("config") / "pairs.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app


@pytest.fixture(scope="module")
def reference() -> Reference:
    folder = embedded_checkpoint()
    return Reference(folder, Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def recovering(served: ServedApp) -> Recovering:
    """Pieces of a stream are exactly the whole sound."""
    lengths, short = {"thinker": 300, "talker": 600}, {"thinker": 8, "talker": 16}
    return Recovering(served, lengths, short, voice="ethan", tolerance=WAVE_TOLERANCE)


def asked(kind: str, voice: str, audio_format: str, **options: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": as_parts(kind)}]
    audio = {"voice": voice, "format": audio_format}
    return {"messages": messages, "modalities": ["text", "audio"], "audio": audio, **LENGTHS, **options}


def samples_of(pcm: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(pcm), "<i2") / 32768


@pytest.mark.parametrize(("kind", "voice"), [("text", "Ethan"), ("audio", "chelsie"), ("audio+image", "aiden")])
def test_the_http_answer_has_the_text_and_sound_of_transformers(
    served: ServedApp, reference: Reference, kind: str, voice: str
) -> None:
    given = media_of(kind)
    # What a client sends are 16-bit samples.
    audios = [np.round(a * 32768).clip(-32768, 32767).astype(np.float32) / 32768 for a in given.audios]
    expected = reference.reply(prompt_text(kind), replace(given, audios=tuple(audios)), voice.lower())
    answer = chat(served, "", **asked(kind, voice, "wav")).json()
    message = answer["choices"][0]["message"]
    # vLLM keeps back bytes that are no whole character yet.
    said = reference.decoded(expected.token_ids)
    assert said.startswith(message["content"]) and set(said.removeprefix(message["content"])) <= {"\ufffd"}
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    np.testing.assert_allclose(samples, expected.sound, atol=WAVE_TOLERANCE + PCM16_STEP)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == len(expected.codes)


def test_a_stream_is_the_whole_answer(served: ServedApp) -> None:
    whole = chat(served, "", **asked("image", "ethan", "pcm16")).json()["choices"][0]["message"]
    streamed = events(chat(served, "", **asked("image", "ethan", "pcm16", stream=True)))
    deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    pieces = sounds(streamed)
    assert len(pieces) > 1
    made, wanted = samples_of("".join(pieces)), samples_of(whole["audio"]["data"])
    assert len(made) == len(wanted) == 1_920 * (MAX_CODES - 1) - 555
    np.testing.assert_allclose(made, wanted, atol=WAVE_TOLERANCE + PCM16_STEP)


def test_a_text_is_spoken_and_a_sound_written_down(served: ServedApp) -> None:
    spoken = served.client.post(
        "/v1/audio/speech",
        json={"model": served.model, "input": "Hello world.", "voice": "Aiden", "response_format": "wav"},
    )
    assert spoken.status_code == 200
    with wave.open(io.BytesIO(spoken.content)) as file:
        assert file.getframerate() == 24_000 and (file.getnframes() + 555) % 1_920 == 0
    files, form = {"file": ("a.wav", spoken.content, "audio/wav")}, {"model": served.model, "language": "en"}
    written = served.client.post("/v1/audio/transcriptions", files=files, data=form)
    assert written.status_code == 200 and written.json()["text"]


def test_a_voice_that_is_not_there_is_refused(served: ServedApp) -> None:
    answer = chat(served, "", **asked("text", "Nobody", "wav"))
    assert answer.status_code == 400
    assert "aiden, chelsie, ethan" in answer.json()["error"]["message"]


@pytest.mark.parametrize("moment", [sound_begins, much_sound])
@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stream_goes_on_when_a_replica_is_killed(recovering: Recovering, stage: str, moment: Moment) -> None:
    asked = recovering.body(seed=SEED)
    assert await recovering.survives(asked, (moment, kill_replica, stage)) == {stage: 1}
