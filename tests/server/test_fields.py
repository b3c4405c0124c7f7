"""Fields of a request as they change the answer, over real engines."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.engine.stages import until
from tests.http_app import MODEL, as_parts
from tests.openai_api.films import video_file
from tests.server.expected import data_url
from tests.server.local import LocalApp

QUESTION = [{"role": "user", "content": "Tell me."}]
CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
CODES = 24
FEW = {"talker": {"max_tokens": CODES, "min_tokens": CODES}}


def ask(local: LocalApp, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, **fields}
    answer = local.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def text(local: LocalApp, **fields: Any) -> str:
    said: str = ask(local, **fields).json()["choices"][0]["message"]["content"]
    return said


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def speak(local: LocalApp, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "Hi.", "seed": 1, "response_format": "pcm", **fields}
    answer = local.client.post(SPEECH, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_vllm_s_names_sample_the_text(local: LocalApp) -> None:
    hot = {"temperature": 1.5, "seed": 1}
    greedy = text(local, temperature=0)
    assert text(local, **hot) != greedy
    assert text(local, **hot, top_k=1) == greedy
    assert text(local, **hot, top_p=0) == greedy
    assert text(local, **hot, min_p=1) == greedy


def test_biases_words_and_ids_of_tokens_are_heeded(local: LocalApp) -> None:
    tokens = ask(local, temperature=0, max_tokens=1, logprobs=True).json()
    first = tokens["choices"][0]["logprobs"]["content"][0]["token"]
    assert not text(local, temperature=0, bad_words=[first]).startswith(first)
    assert len(set(text(local, temperature=0, allowed_token_ids=[40]))) == 1
    assert text(local, temperature=0, logit_bias={"40": 100}) == text(local, temperature=0, allowed_token_ids=[40])
    stopped = ask(local, temperature=0, allowed_token_ids=[40], stop_token_ids=[40]).json()
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)


def test_a_developer_says_what_a_system_says(local: LocalApp) -> None:
    said = [
        text(local, messages=[{"role": role, "content": "Be brief."}, *QUESTION]) for role in ("developer", "system")
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(local: LocalApp, stream: bool) -> None:
    asked = {"n": 3, "seed": 5, "temperature": 1.0, "stream": stream}
    alone = [text(local, seed=5 + i, temperature=1.0) for i in range(3)]
    if stream:
        said = events(ask(local, **asked, stream_options={"include_usage": True}))
        choices = [choice for event in said for choice in event["choices"]]
        texts = ["".join(c["delta"].get("content") or "" for c in choices if c["index"] == i) for i in range(3)]
        ends = sorted((c["index"], c["finish_reason"]) for c in choices if c["finish_reason"])
        usage = said[-1]["usage"]
        assert len({event["id"] for event in said}) == 1
    else:
        body = ask(local, **asked).json()
        texts = [choice["message"]["content"] for choice in body["choices"]]
        ends = [(choice["index"], choice["finish_reason"]) for choice in body["choices"]]
        usage = body["usage"]
    assert texts == alone and len(set(texts)) == 3
    assert ends == [(i, "length") for i in range(3)]
    assert usage["completion_tokens"] == 24 and usage["total_tokens"] == 24 + usage["prompt_tokens"]


def test_several_answers_are_heard(local: LocalApp) -> None:
    asked = {"n": 2, "modalities": ["audio"], "stage_sampling": FEW, "seed": 2, "audio": {"format": "pcm16"}}
    body = ask(local, **asked).json()
    sounds = [base64.b64decode(choice["message"]["audio"]["data"]) for choice in body["choices"]]
    assert [len(sound) for sound in sounds] == [960 * CODES] * 2 and sounds[0] != sounds[1]
    streamed = [choice for event in events(ask(local, **asked, stream=True)) for choice in event["choices"]]
    for index in range(2):
        audio = [choice["delta"].get("audio", {}) for choice in streamed if choice["index"] == index]
        assert sum(len(base64.b64decode(each.get("data", ""))) for each in audio) == 960 * CODES
        assert sum("id" in each for each in audio) == 1


async def test_who_leaves_ends_all_answers(local: LocalApp) -> None:
    body = {"model": MODEL, "messages": QUESTION, "n": 4, "stream": True, "max_tokens": 500, "ignore_eos": True}
    with local.client.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_lines())
    await until(local.nothing_is_left)


def test_usage_counts_as_openai_does(local: LocalApp) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": as_parts("audio")}], "stage_sampling": FEW}
    usage = ask(local, **asked, modalities=["text", "audio"]).json()["usage"]
    details = usage["completion_tokens_details"]
    assert (details["audio_tokens"], details["text_tokens"]) == (CODES, usage["completion_tokens"] - CODES)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["prompt_tokens_details"]["audio_tokens"] < usage["prompt_tokens"]
    long = [{"role": "user", "content": "Tell me all about it. " * 60}]
    again = [ask(local, messages=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert again[0] == 0 < again[1]


def test_usage_so_far_is_in_every_chunk(local: LocalApp) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events(ask(local, stream=True, stream_options=options))]
    assert counts == sorted(counts) and counts[-1] == 8


def test_a_voice_by_an_alias_is_told(local: LocalApp) -> None:
    spoken = speak(local, voice="onyx")
    assert spoken.headers["x-omni-voice"] == "Ethan"
    assert spoken.content == speak(local, voice="ETHAN").content == speak(local, speaker="Ethan").content
    assert spoken.content != speak(local, voice="alloy").content == speak(local).content
    heard = ask(local, audio={"voice": "Echo"}, stage_sampling=FEW)
    assert (heard.json()["choices"][0]["message"]["audio"]["voice"], heard.headers["x-omni-voice"]) == ("Ethan",) * 2
    assert "x-omni-voice" not in ask(local).headers


def test_how_to_speak_is_told_as_ignored(local: LocalApp) -> None:
    spoken = speak(local, instructions="Softly.", language="English", user="u")
    assert spoken.headers["x-omni-ignored"] == "instructions, language"
    assert "x-omni-ignored" not in speak(local, instructions="").headers
    assert speak(local, stream=True, response_format="wav").content.startswith(b"RIFF")


def test_a_sound_of_nothing_is_a_file(local: LocalApp) -> None:
    heard = ask(local, max_tokens=1, audio={"format": "wav"}, allowed_token_ids=[40], stop_token_ids=[40])
    audio = heard.json()["choices"][0]["message"]["audio"]
    with wave.open(io.BytesIO(base64.b64decode(audio["data"]))) as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)


@pytest.mark.parametrize("kind", ["text", "video"])
def test_vllm_omni_s_request(local: LocalApp, kind: str) -> None:
    """As its client of this family sends it, but for shorter lengths, and `modalities` in place of the server's own."""
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 42, "detokenize": True, "repetition_penalty": 1.1}
    sampled = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 42, "detokenize": True}
    talker = sampled | {"max_tokens": CODES, "repetition_penalty": 1.05, "stop_token_ids": [8294]}
    fields: dict[str, Any] = {
        "sampling_params_list": [greedy | {"max_tokens": 8}, talker, greedy | {"max_tokens": 2048}],
        "modalities": ["text", "audio"],
    }
    text_part = {"type": "text", "text": "What is said?"}
    parts = [text_part] if kind == "text" else [_film(num_frames=16), text_part]
    if kind == "video":
        fields["mm_processor_kwargs"] = {"use_audio_in_video": True}
    body = ask(local, messages=[{"role": "user", "content": parts}], max_tokens=None, **fields).json()
    assert body["choices"][0]["message"]["audio"]["data"]


def test_a_client_says_how_many_frames_are_shown(local: LocalApp) -> None:
    few, many = (
        ask(local, messages=[{"role": "user", "content": [_film(num_frames=number)]}]).json()["usage"]["prompt_tokens"]
        for number in (2, 16)
    )
    assert few < many


def _film(**options: int) -> dict[str, Any]:
    url = data_url(video_file(frames=60, sound="aac"), "video/mp4")
    return {"type": "video_url", "video_url": {"url": url, **options}}


def test_a_second_turn_gives_the_first_answer_back(local: LocalApp) -> None:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            **{"model": MODEL, "max_tokens": 8, "modalities": ["text", "audio"], "user": "u", "store": True},
            **{"audio": {"voice": "alloy", "format": "wav"}, "extra_body": {"stage_sampling_params": FEW}},
        }
        first = client.chat.completions.create(messages=QUESTION, **asked).choices[0].message  # type: ignore[call-overload]
        second = client.chat.completions.create(messages=[*QUESTION, first, *QUESTION], **asked)  # type: ignore[call-overload]
        assert second.choices[0].message.audio.transcript == second.choices[0].message.content
