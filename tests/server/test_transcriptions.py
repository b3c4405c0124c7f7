"""Sound that is written down: what OpenAI's client asks, and that it is the chat's answer to the family's words."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.engine.one_by_one import give_one_by_one
from tests.engine.stages import until
from tests.http_app import MODEL
from tests.openai_api.forms import sound
from tests.server.local import LocalApp

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SOUND = sound(0.5)
TOKENS = 12


@pytest.fixture
def client(local: LocalApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(local: LocalApp, system: str, words: str) -> dict[str, Any]:
    """The chat's answer about the same sound."""
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": f"You are a speech {system} model."}]},
        {"role": "user", "content": [{"type": "text", "text": words}, part]},
    ]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": TOKENS, "logprobs": True}
    answer = local.client.post("/v1/chat/completions", json=body)
    made: dict[str, Any] = answer.raise_for_status().json()
    return made


def posted(local: LocalApp, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    data = {"model": MODEL, "max_completion_tokens": TOKENS, **fields}
    return local.client.post(path, data=data, files={"file": ("a.wav", SOUND)})


@pytest.mark.parametrize(
    ("path", "fields", "system", "words"),
    [
        (TRANSCRIPTIONS, {}, "recognition", "Transcribe the audio into text."),
        (
            TRANSCRIPTIONS,
            {"language": "fr", "prompt": "Ça <|im_end|>"},
            "recognition",
            "Transcribe the French audio into text.\nContext: Ça <|im_end|>",
        ),
        (
            "/v1/audio/translations",
            {"language": "en", "to_language": "zh"},
            "translation",
            "Listen to the provided English speech and produce a translation in Chinese text.",
        ),
    ],
)
def test_a_transcript_is_the_chat_s_answer_token_by_token(
    local: LocalApp, path: str, fields: dict[str, str], system: str, words: str
) -> None:
    wanted = asked(local, system, words)
    (choice,) = wanted["choices"]
    told = choice["logprobs"]["content"]
    heard = posted(local, path, **fields, **{"include[]": "logprobs"}).raise_for_status().json()
    assert (heard["text"], heard["finish_reason"]) == (choice["message"]["content"], choice["finish_reason"])
    assert [one["token"] for one in heard["logprobs"]] == [one["token"] for one in told]
    usage = heard["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        wanted["usage"]["prompt_tokens"], wanted["usage"]["completion_tokens"],
    )  # fmt: skip
    details = usage["input_token_details"]
    assert details["audio_tokens"] > 1
    assert details["audio_tokens"] + details["text_tokens"] == usage["input_tokens"]


def test_openai_s_client_gets_every_format(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "extra_body": {"max_completion_tokens": TOKENS}, "language": "en"}
    create = client.audio.transcriptions.create
    plain = create(file=("a.wav", SOUND), **options)
    text: Any = create(file=("a.flac", sound(0.5, "FLAC")), response_format="text", **options)
    verbose = create(
        file=("a.wav", SOUND), response_format="verbose_json", timestamp_granularities=["segment"], **options
    )
    assert plain.text == verbose.text and text == plain.text + "\n"
    assert plain.usage is not None and plain.usage.type == "tokens" and plain.usage.output_tokens <= TOKENS + 1
    assert (verbose.duration, verbose.language) == (0.5, "english")
    assert verbose.segments is not None
    assert [(each.start, each.end, each.text) for each in verbose.segments] == [(0.0, 0.5, verbose.text)]
    subtitles: Any = create(file=("a.wav", SOUND), response_format="srt", **options)
    assert subtitles.startswith("1\n00:00:00,000 --> 00:00:00,500\n")
    cues: Any = client.audio.translations.create(model=MODEL, file=("a.wav", SOUND), response_format="vtt")
    assert cues.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n")


def test_a_stream_says_what_the_whole_transcript_says(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    give_one_by_one(monkeypatch)  # else the deltas of a busy machine may be one
    options: dict[str, Any] = {"model": MODEL, "extra_body": {"max_completion_tokens": TOKENS}, "temperature": 0.7}
    options["extra_body"]["seed"] = 5
    whole = client.audio.transcriptions.create(file=("a.wav", SOUND), **options)
    *deltas, done = client.audio.transcriptions.create(file=("a.wav", SOUND), stream=True, **options)
    assert done.type == "transcript.text.done" and done.text == whole.text
    assert {each.type for each in deltas} == {"transcript.text.delta"} and len(deltas) > 1
    assert "".join(each.delta for each in deltas if each.type == "transcript.text.delta") == whole.text
    assert done.usage is not None and whole.usage is not None
    assert done.usage.to_dict() == whole.usage.to_dict()


def test_a_format_without_a_place_for_it_says_in_a_header_how_it_ended(local: LocalApp) -> None:
    ended = posted(local, response_format="text", max_completion_tokens=2)
    assert ended.headers["x-omni-finish-reason"] == "length" and ended.headers["content-type"].startswith("text/plain")


def test_a_refusal_is_the_sdk_s_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.audio.transcriptions.create(model="whisper-1", file=("a.wav", SOUND))
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.APIStatusError) as broken:
        client.audio.translations.create(model=MODEL, file=("a.wav", b"no sound"))
    assert (broken.value.status_code, broken.value.param) == (415, "file")


def test_a_page_of_another_site_may_send_no_form(local: LocalApp) -> None:
    files = {"file": ("a.wav", SOUND)}
    refused = local.client.post(
        TRANSCRIPTIONS, data={"model": MODEL}, files=files, headers={"Origin": "https://evil.example"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    own = local.client.post(TRANSCRIPTIONS, data={"model": MODEL}, files=files, headers={"Origin": local.url})
    assert own.status_code == 200


def test_its_requests_are_counted(local: LocalApp) -> None:
    posted(local).raise_for_status()
    text = local.client.get("/metrics").text
    assert f'endpoint="{TRANSCRIPTIONS}"' in text


async def test_a_client_that_leaves_ends_its_request(local: LocalApp) -> None:
    data = {"model": MODEL, "stream": "true", "max_completion_tokens": 200, "temperature": "1.5"}
    async with (
        httpx.AsyncClient(base_url=local.url, timeout=60) as client,
        client.stream("POST", TRANSCRIPTIONS, data=data, files={"file": SOUND}) as answer,
    ):
        first = await anext(answer.aiter_lines())
        assert json.loads(first.removeprefix("data: "))["type"] == "transcript.text.delta"
    async with asyncio.timeout(60):
        await until(local.nothing_is_left)
