"""The toy family by `OmniLLM` and the HTTP face: what holds of every family, without an engine."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy import stages
from toy.family import Toy

from omni_cluster.engine.omni_llm import OmniLLM, OmniPrompt
from omni_cluster.models.registry import family_class, known_families
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest, Prompt
from tests.server.local import LocalApp, local_app

FAMILIES = Path(__file__).parent
CONFIG = FAMILIES / "toy" / "toy.yaml"
SAID = "Good morning"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def toy() -> Iterator[OmniLLM]:
    with OmniLLM(CONFIG) as omni:
        yield omni


@pytest.fixture(scope="module")
def toy_app(toy: OmniLLM) -> Iterator[LocalApp]:
    with local_app(toy) as app:
        yield app


def test_a_package_registers_its_family_by_an_entry_point() -> None:
    assert {"toy", "toy_reader"} < set(known_families()) and family_class("toy") is Toy


def test_it_says_what_it_was_told_in_text_and_sound(toy: OmniLLM) -> None:
    (made,) = toy.generate([SAID])
    assert (made.text, made.finish_reason) == (SAID, "stop")
    assert made.audio is not None and made.audio.sample_rate_hz == stages.RATE_HZ
    assert len(made.audio.samples) == len(SAID) * stages.SAMPLES_PER_CODE
    assert made.codes is not None and made.codes.values.shape == (len(SAID), stages.CODEBOOKS)


def test_text_alone_needs_one_stage(toy: OmniLLM) -> None:
    (made,) = toy.generate([SAID], modalities=["text"])
    assert made.text == SAID and made.audio is None and made.codes is None


def test_each_voice_and_seed_sounds_otherwise_and_always_the_same(toy: OmniLLM) -> None:
    asked = [("low", 0), ("low", 0), ("high", 0), ("low", 1)]
    made = toy.generate([SAID] * 4, voice=[voice for voice, _ in asked], seed=[seed for _, seed in asked])
    sounds = [one.audio.samples.tobytes() for one in made if one.audio is not None]
    assert sounds[0] == sounds[1] and len(set(sounds)) == 3


def test_lengths_are_those_that_are_asked_for(toy: OmniLLM) -> None:
    text, codes = ({"max_tokens": count, "min_tokens": count, "ignore_eos": True} for count in (5, 7))
    (made,) = toy.generate([SAID], [text, codes, {}])
    assert (made.text, len(made.token_ids), made.codec_tokens) == (SAID[:5], 5, 7)
    assert made.audio is not None and len(made.audio.samples) == 7 * stages.SAMPLES_PER_CODE
    assert made.finish_reason == "length"


def test_it_says_what_pictures_it_was_shown(toy: OmniLLM) -> None:
    (made,) = toy.generate([OmniPrompt(SAID, Media(images=(np.zeros((3, 7, 3), np.uint8),)))], modalities=["text"])
    assert made.text == f"[7x3] {SAID}"


def test_lengths_that_cannot_be_are_refused(toy: OmniLLM) -> None:
    with pytest.raises(RequestError, match="min_tokens of stage codes is 2; use 1 at most"):
        toy.generate([SAID], [{}, {"min_tokens": 2, "max_tokens": 1}, {}])


def test_what_it_was_told_is_in_its_sound_whatever_it_says(toy: OmniLLM) -> None:
    said = {"max_tokens": 4, "min_tokens": 4}
    made = toy.generate([SAID, f"{SAID}."], [said, {}, {}])
    sounds = [one.audio.samples.tobytes() for one in made if one.audio is not None]
    assert made[0].text == made[1].text and sounds[0] != sounds[1]


def test_media_that_it_does_not_take_are_refused_before_any_stage_begins(toy: OmniLLM) -> None:
    with pytest.raises(RequestError, match="the toy takes text and pictures"):
        toy.generate([OmniPrompt(SAID, Media(audios=(np.zeros(9, np.float32),)))])


@pytest.mark.parametrize("known_codes", [0, 1, 6, len(SAID)])
def test_a_request_that_is_begun_again_goes_on_where_its_client_is(toy: OmniLLM, known_codes: int) -> None:
    (whole,) = toy.generate([SAID])
    assert whole.audio is not None and whole.codes is not None
    samples = known_codes * stages.SAMPLES_PER_CODE
    known = {
        "text": KnownOutput(whole.token_ids, "stop"),
        "codes": KnownOutput(
            (), "stop" if known_codes == len(SAID) else None, codes=whole.codes.between(0, known_codes)
        ),
        "sound": KnownOutput(num_samples=samples),
    }
    request = OmniRequest("again", Prompt(SAID), known=known, streams_audio=True)
    rest = toy._run(toy._async.generate(request))
    assert rest.codes == whole.codes
    heard = np.zeros(0, np.float32) if rest.audio is None else rest.audio.samples
    assert np.array_equal(heard, whole.audio.samples[samples:])


def test_a_chat_streams_its_sound_at_the_familys_own_rate(toy_app: LocalApp) -> None:
    body = {"model": "preset:tiny", "messages": [{"role": "user", "content": SAID}], "modalities": ["text", "audio"]}
    whole = toy_app.client.post(
        "/v1/chat/completions", json=body | {"audio": {"voice": "high", "format": "wav"}}
    ).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == SAID
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnframes()) == (stages.RATE_HZ, len(SAID) * stages.SAMPLES_PER_CODE)
    assert whole["usage"]["completion_tokens_details"]["audio_tokens"] == len(SAID)


def test_speech_and_its_pieces_are_one_sound(toy_app: LocalApp) -> None:
    body = {"model": "preset:tiny", "input": SAID, "voice": "low", "response_format": "pcm", "seed": 3}
    whole = toy_app.client.post("/v1/audio/speech", json=body)
    streamed = toy_app.client.post("/v1/audio/speech", json=body | {"stream_format": "audio"})
    assert whole.status_code == streamed.status_code == 200
    assert whole.content == streamed.content and len(whole.content) == 2 * len(SAID) * stages.SAMPLES_PER_CODE


def test_models_tokens_and_completions_are_the_familys(toy_app: LocalApp) -> None:
    client = toy_app.client
    (model,) = client.get("/v1/models").json()["data"]
    assert model["voices"] == ["low", "high"]
    assert client.post("/tokenize", json={"prompt": "hé"}).json()["tokens"] == [*"hé".encode()]
    made = client.post("/v1/completions", json={"model": "preset:tiny", "prompt": SAID, "max_tokens": 4}).json()
    assert (made["choices"][0]["text"], made["choices"][0]["finish_reason"]) == (SAID[:4], "length")


async def test_a_client_that_leaves_leaves_nothing_behind(toy_app: LocalApp) -> None:
    body = {"model": "preset:tiny", "input": SAID, "stream_format": "audio", "response_format": "pcm"}
    with toy_app.client.stream("POST", "/v1/audio/speech", json=body) as response:
        assert response.status_code == 200
    async with asyncio.timeout(PATIENCE_S):
        while not await toy_app.nothing_is_left():
            await asyncio.sleep(0.01)


def test_it_is_up_without_the_engines_libraries() -> None:
    code = (
        "import sys; from omni_cluster.engine.omni_llm import OmniLLM\n"
        f"with OmniLLM({str(CONFIG)!r}) as omni:\n"
        f"    assert omni.generate([{SAID!r}])[0].text == {SAID!r}\n"
        "print(sorted({'vllm', 'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    path = os.pathsep.join([str(FAMILIES.parents[1]), str(FAMILIES)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"


def test_a_family_without_text_reads_aloud_and_has_no_chat() -> None:
    with OmniLLM(FAMILIES / "toy" / "reader.yaml") as omni, local_app(omni) as app:
        paths = set(app.client.get("/openapi.json").json()["paths"])
        assert "/v1/audio/speech" in paths and not any("chat" in path or "token" in path for path in paths)
        body = {"model": "preset:tiny", "input": SAID, "response_format": "pcm", "seed": 3}
        whole, streamed = (app.client.post("/v1/audio/speech", json=body | more) for more in ({}, {"stream": True}))
        assert whole.content == streamed.content and len(whole.content) == 2 * len(SAID) * stages.SAMPLES_PER_CODE
        refused = app.client.post("/v1/audio/speech", json=body | {"voice": "low"})
        assert refused.status_code == 400
        how = {"instructions": "loudly", "language": "English"}
        loud, upper = (app.client.post("/v1/audio/speech", json=body | m) for m in (how, {"input": SAID.upper()}))
        assert loud.content == upper.content != whole.content
        assert loud.headers["x-omni-ignored"] == "language"
        refused = app.client.post("/v1/audio/speech", json=body | {"instructions": "softly"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "instructions"
        request = OmniRequest("spoken", Prompt(""), reply=SAID, speaking={"language": "English"})
        with pytest.raises(RequestError, match="language is 'English', but toy_reader does not heed it; leave it out"):
            omni._async.bound.check(request)
        with pytest.raises(RequestError, match="toy_reader answers in no text; use /v1/audio/speech"):
            omni.render([{"role": "user", "content": SAID}])
