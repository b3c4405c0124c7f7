"""The embedded default behind `serve run deployments:app`: parity, the API, hand-over, and what a request leaves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import wave
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from omni_cluster.cluster.consumer import ReplicaConnections
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.config.caches import compiled_folder
from omni_cluster.engine.caches import PARTS
from omni_cluster.types.errors import RequestError
from omni_cluster.types.rows import Rows
from tests.codes import codes_of
from tests.engine.stages import whole_rows
from tests.http_app import (
    MODEL,
    PCM16_STEP,
    STREAM_TOLERANCE,
    WAVE_TOLERANCE,
    as_parts,
    assert_comes_in,
    assert_equals_reference,
    chat,
    events,
    nothing_is_left,
    sounds,
    talker_runs,
    with_lengths,
)
from tests.processes import engine_of
from tests.reference import KINDS, Reference, media, prompt_text
from tests.served.app import BASE_URL, STAGES, ServedApp, request_for, until
from tests.served.leftovers import store_bytes

SAMPLES_A_CODE = 480
DASHBOARD_URL = "http://127.0.0.1:8265"
SAMPLES_PER_CODE = 480
SOME_KINDS = ["text", "audio+image", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("audio", "image"))]


@pytest.mark.parametrize("kind", SOME_KINDS)
async def test_a_request_equals_the_reference(served: ServedApp, speak: Any, kind: str) -> None:
    output = await served.answer(request_for(kind, f"alone-{kind}"))
    assert_equals_reference(output, speak(kind))


@pytest.mark.full
async def test_requests_at_once_equal_the_reference_each_in_its_own_voice(served: ServedApp, speak: Any) -> None:
    asked = [(kind, voice) for kind in KINDS for voice in ("Chelsie", "Ethan")]
    outputs = await asyncio.gather(
        *[served.answer(request_for(kind, f"batch-{kind}-{voice}", voice=voice, seed=7)) for kind, voice in asked]
    )
    for output, (kind, voice) in zip(outputs, asked, strict=True):
        assert_equals_reference(output, speak(kind, voice, 7))


def test_the_dashboard_shows_each_stage_as_its_own_deployment(served: ServedApp) -> None:
    # Ray guards its dashboard by a token that it makes on a machine's first start.
    headers = get_auth_headers_if_auth_enabled({})
    details = httpx.get(f"{DASHBOARD_URL}/api/serve/applications/", headers=headers, timeout=30).json()
    deployments = details["applications"]["default"]["deployments"]
    assert set(deployments) == {*STAGES, "ingress"}
    assert {d["status"] for d in deployments.values()} == {"HEALTHY"}


def test_models_and_health(served: ServedApp) -> None:
    models = served.client.get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == [MODEL]
    assert models["data"][0]["voices"] == ["Chelsie", "Ethan"]
    assert served.client.get("/v1/audio/voices").json()["names"] == ["Chelsie", "Ethan"]
    assert served.client.get("/health").status_code == 200


def test_ready_says_how_many_replicas_each_stage_has(served: ServedApp) -> None:
    answer = served.client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "replicas": dict.fromkeys(STAGES, 1)})


@pytest.mark.parametrize("sent", ["mine-1", "x" * 128])
def test_a_request_s_id_comes_back(served: ServedApp, sent: str) -> None:
    for path in ("/health", "/nowhere"):
        assert served.client.get(path, headers={"x-request-id": sent}).headers.get_list("x-request-id") == [sent]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_sound_comes_in_the_format_asked_for(served: ServedApp, stream: bool) -> None:
    assert_comes_in("opus", served, stream=stream)


def speak_text(served: ServedApp, **options: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "Hello there, my friend.", "voice": "Ethan", "seed": 4, **options}
    return served.client.post("/v1/audio/speech", json=body)


def test_a_text_is_spoken_whole_and_in_pieces_of_the_same_length(served: ServedApp) -> None:
    whole = speak_text(served, response_format="pcm")
    assert (whole.status_code, whole.headers["content-type"]) == (200, "audio/pcm")
    assert len(whole.content) > 0 and len(whole.content) % (2 * SAMPLES_A_CODE) == 0
    raw = speak_text(served, response_format="pcm", stream_format="audio")
    assert (raw.headers["content-type"], len(raw.content)) == ("audio/pcm", len(whole.content))
    streamed = speak_text(served, response_format="pcm", stream_format="sse")
    said = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data: ")]
    events = b"".join(base64.b64decode(event["audio"]) for event in said[:-1])
    for stream in (raw.content, events):  # how long the pieces of each are depends on how soon they were asked for
        off = np.abs(np.frombuffer(stream, "<i2").astype(int) - np.frombuffer(whole.content, "<i2")).max()
        assert len(stream) == len(whole.content) and off * PCM16_STEP <= STREAM_TOLERANCE + PCM16_STEP
    assert said[-1]["type"] == "speech.audio.done"
    assert said[-1]["usage"]["output_tokens"] >= len(whole.content) // (2 * SAMPLES_A_CODE)
    assert speak_text(served, response_format="flac").content.startswith(b"fLaC")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"input": "word " * 819}, 400, "at most 2048 can be spoken"),
        ({"model": "nobody"}, 404, "preset:tiny"),
        ({"speed": 1.5}, 400, "speed"),
    ],
)
@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
async def test_bad_speech_requests_get_their_sentence_and_start_nothing(
    served: ServedApp, options: dict[str, Any], status: int, words: str, stream_format: str | None
) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before = await steps_taken(served)
    answer = speak_text(served, stream_format=stream_format, **options)
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert await steps_taken(served) == before
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_http_answer_has_the_reference_s_text_and_sound(served: ServedApp, reference: Reference, kind: str) -> None:
    audios, images = media(kind)
    # What a client sends are 16-bit samples.
    audios = [np.round(a * 32768).clip(-32768, 32767).astype(np.float32) / 32768 for a in audios]
    expected = reference.speech(
        prompt_text(kind), audios, images, voice="Ethan", max_new_tokens=8, max_codes=120, seed=5
    )
    answer = chat(
        served, as_parts(kind), modalities=["text", "audio"], audio={"voice": "Ethan", "format": "wav"},
        max_tokens=8, seed=5,
    ).json()  # fmt: skip
    message = answer["choices"][0]["message"]
    decoded = reference.processor.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert message["content"] == message["audio"]["transcript"]
    # vLLM keeps back bytes that are no whole character yet; at the end of a reply they stay unsaid.
    assert decoded.startswith(message["content"])
    assert set(decoded.removeprefix(message["content"])) <= {"\ufffd"}
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    np.testing.assert_allclose(samples, expected.waveform, atol=WAVE_TOLERANCE + PCM16_STEP)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == len(expected.codes)


def test_a_streamed_answer_says_what_the_whole_one_says(served: ServedApp) -> None:
    options = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}, "seed": 3}
    whole = chat(served, "Tell me.", **options).json()["choices"][0]["message"]
    streamed = events(chat(served, "Tell me.", **options, stream=True, stream_options={"include_usage": True}))
    deltas = [e["choices"][0]["delta"] for e in streamed if e["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content") or "" for d in deltas) == whole["content"]
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode("".join(sounds(streamed))), "<i2") / 32768,
        np.frombuffer(base64.b64decode(whole["audio"]["data"]), "<i2") / 32768,
        atol=STREAM_TOLERANCE,
    )
    assert streamed[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert set(streamed[-2]["omni"]["stages"]) == set(STAGES)
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] > 0


def test_sound_streams_while_the_talker_speaks(served: ServedApp) -> None:
    # Long enough that the first piece is made before the last code on any machine.
    talk = {"sampling_params_list": [None, {"max_tokens": 500}, None]}
    options = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}, "seed": 3}
    streamed = events(chat(served, "Tell me.", **options, **talk, stream=True))
    stages = streamed[-1]["omni"]["stages"]
    pieces = sounds(streamed)
    assert len(pieces) >= 2
    assert stages["code2wav"]["first_s"] < stages["talker"]["last_s"]
    assert len(base64.b64decode("".join(pieces))) == 2 * SAMPLES_PER_CODE * stages["talker"]["tokens"]


def test_text_does_not_wait_for_sound(served: ServedApp) -> None:
    options = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}, "max_tokens": 8}
    streamed = events(chat(served, "Tell me.", **options, stream=True))
    deltas = [event["choices"][0]["delta"] for event in streamed]
    first_sound = next(i for i, d in enumerate(deltas) if "data" in d.get("audio", {}))
    assert any(d.get("content") for d in deltas[:first_sound])


def test_each_piece_is_a_file_when_no_format_is_asked_for(served: ServedApp) -> None:
    # Long enough that an ingress which stands still for a while gets more than one piece all the same.
    talk = {"stage_sampling_params": {"talker": {"max_tokens": 300}}}
    streamed = events(chat(served, "Tell me.", modalities=["text", "audio"], seed=3, stream=True, **talk))
    pieces = sounds(streamed)
    num_samples = 0
    for piece in pieces:
        with wave.open(io.BytesIO(base64.b64decode(piece))) as file:
            assert file.getframerate() == 24_000
            num_samples += file.getnframes()
    assert len(pieces) >= 2
    assert num_samples == SAMPLES_PER_CODE * streamed[-1]["omni"]["stages"]["talker"]["tokens"]


@pytest.mark.full
async def test_streams_at_once_sound_as_the_whole_answers_do(served: ServedApp, speak: Any) -> None:
    asked = [("text", "Chelsie", 1), ("image", "Ethan", 2), ("text", "Ethan", 3), ("image", "Chelsie", 4)]
    requests = [request_for(k, f"streamed-{k}-{v}", voice=v, seed=s) for k, v, s in asked]
    outputs = await asyncio.gather(
        *[served.answer(dataclasses.replace(request, streams_audio=True)) for request in requests]
    )
    for output, (kind, voice, seed) in zip(outputs, asked, strict=True):
        expected = speak(kind, voice, seed)
        assert codes_of(output) == list(expected.codes)
        np.testing.assert_allclose(output.audio.samples, expected.waveform, atol=STREAM_TOLERANCE)
    await until(lambda: nothing_is_left(served), "no stream's state is left")


async def test_a_text_request_costs_the_audio_stages_nothing(served: ServedApp) -> None:
    answer = chat(served, "Only text, please.").json()
    assert answer["choices"][0]["message"]["content"]
    assert "audio" not in answer["choices"][0]["message"]
    assert set(answer["omni"]["stages"]) == {"thinker"}


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"model": "nobody"}, 404, "preset:tiny"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "Bob", "format": "wav"}}, 400, "Chelsie"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 100_000}, 400, "512"),
        (
            {"messages": [{"role": "user", "content": "word " * 900}]},
            400,
            "length is 1536 tokens, but the prompt has 1824 tokens, media included",
        ),
        (
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            400,
            "1536 tokens, but the prompt has 8024 tokens",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": DASHBOARD_URL}}]}]},
            400,
            "not a public host",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_get_their_sentence_and_start_nothing(
    served: ServedApp, options: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before = await steps_taken(served)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **options}
    response = served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]
    assert await steps_taken(served) == before
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


async def test_an_error_of_a_stage_reaches_the_caller_as_what_it_is(served: ServedApp) -> None:
    request = request_for("text", "bad-sampling")
    with pytest.raises(RequestError, match="'heat'"):
        await served.answer(dataclasses.replace(request, sampling={"talker": {"heat": 1}}))
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


async def steps_taken(served: ServedApp) -> list[int | None]:
    """By each engine: what is refused by a stage itself was sent there, and gets no further."""
    return [status["engine"].get("steps") for status in await served.statuses()]


async def test_the_engines_of_all_stages_keep_what_they_compile_in_one_folder(served: ServedApp) -> None:
    folder = compiled_folder(None)
    for stage in ("thinker", "talker"):
        (status,) = await served.statuses_of(stage)
        environment = psutil.Process(engine_of(status["pid"])).environ()
        assert {name: environment.get(name) for name in PARTS} == {n: f"{folder}/{part}" for n, part in PARTS.items()}


ENDLESS = {"stage_sampling_params": {"talker": {"max_tokens": 2000, "min_tokens": 2000}}}
"""Of an answer that its client leaves: it speaks for so long that none can end before the test has seen it at work."""


@pytest.mark.parametrize("after", ["first text", "first code", "first sound"])
async def test_a_client_that_leaves_frees_every_stage(served: ServedApp, after: str) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before = store_bytes()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "A long story. " * 60}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "wav"},
        "stream": True,
        **ENDLESS,
    }
    client = httpx.AsyncClient(base_url=BASE_URL, timeout=60)
    async with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()  # held: httpx closes the response when it goes
        while '"content"' not in await anext(lines):
            pass
        if after == "first code":
            await until(lambda: talker_runs(served), "the talker started")
        if after == "first sound":
            while not has_sound(await anext(lines)):
                pass
    await until(lambda: nothing_is_left(served), "all stages let go of the request")

    async def store_is_as_before() -> bool:
        return store_bytes() <= before

    await until(store_is_as_before, "no object of the request is left in the store")


def has_sound(line: str) -> bool:
    return line.startswith("data: {") and bool(sounds([json.loads(line.removeprefix("data: "))]))


@pytest.mark.full
async def test_the_end_of_the_request_that_opened_the_call_for_rows_disturbs_no_other(served: ServedApp) -> None:
    await until(lambda: no_call_for_rows_is_open(served), "the calls of earlier requests have ended")
    opener = asyncio.create_task(served.answer(with_lengths(request_for("text", "opens"), 4, 480)))
    await until(lambda: talker_runs(served), "the talker started on the first")
    stays = asyncio.create_task(served.answer(with_lengths(request_for("text", "stays"), 400, 2000)))
    await opener
    assert not stays.done()
    answer = await stays
    assert len(answer.token_ids) == 400 and answer.codec_tokens == 2000
    await until(lambda: no_call_for_rows_is_open(served), "a call that nobody reads has ended")


async def no_call_for_rows_is_open(served: ServedApp) -> bool:
    return not any(status["open_rows_calls"] for status in await served.statuses_of("thinker"))


async def test_all_rows_cross_as_objects_and_none_of_them_stays(served: ServedApp, reference: Reference) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    stored, (before,) = store_bytes(), [s["rows_sent_bytes"] for s in await served.statuses_of("thinker")]
    question = "Count with me. " * 40  # above what is an object of its own
    output = await served.answer(request_for("text", "rows", question=question))
    (after,) = [s["rows_sent_bytes"] for s in await served.statuses_of("thinker")]
    width = reference.thinker(prompt_text("text", question), max_new_tokens=2).rows.shape[1]
    made = len(output.prompt_token_ids) + len(output.token_ids) - 1
    assert after["as_objects"] - before["as_objects"] >= made * width * 4

    del output  # its sound is an object too

    async def store_is_as_before() -> bool:
        return await nothing_is_left(served) and store_bytes() <= stored

    await until(store_is_as_before, "no object of the request is left in the store")


async def test_a_whole_answer_that_nobody_waits_for_frees_every_stage(served: ServedApp) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"],
            "audio": {"voice": "Ethan", "format": "wav"}, **ENDLESS}  # fmt: skip
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: talker_runs(served), "the talker started")
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


async def test_a_consumer_that_lags_loses_nothing(served: ServedApp, reference: Reference) -> None:
    question = "Count with me. " * 40
    expected = reference.thinker(prompt_text("text", question), max_new_tokens=12)
    request = request_for("text", "lag", question=question)
    request = dataclasses.replace(request, sampling={"thinker": {"max_tokens": 12}})
    thinker = RemoteStage(served.handle("thinker"))
    made = thinker.stream("generate", request, None)
    async with contextlib.aclosing(made):
        ticket: Ticket = await anext(made)
        connections = ReplicaConnections(thinker, 1 << 28)
        async for chunk in connections.read(ticket, with_rows=False):
            assert chunk.rows is None
        chunks = []
        async with contextlib.aclosing(connections.read(ticket, with_rows=True)) as pulled:
            async for chunk in pulled:
                await asyncio.sleep(0.5)  # the lag that this test is about
                chunks.append(chunk)
        rows = await whole_rows(Rows.joined([c.rows for c in chunks if c.rows is not None]))
        await connections.close()
    torch.testing.assert_close(rows, expected.rows, atol=1e-4, rtol=0)
    assert [t for c in chunks for t in c.token_ids] == list(expected.token_ids)
    await until(lambda: nothing_is_left(served), "the thinker let go of the request")
