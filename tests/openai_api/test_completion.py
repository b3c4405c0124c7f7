"""The answers of a chat as its clients read them."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest

from omni_cluster.openai_api.chat import ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.completion import ChatStream, Spoken, Usage, completion
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.video import VideoLimits
from omni_cluster.types.outputs import Call, CallDelta, TokenChoice, TokenLogprob

LIMITS = ApiLimits(10_000, 1, 1, 1, 10_000, 1.0, 100, 300, 64, VideoLimits(1.0, 2, 100), 28_000)

USAGE = Usage(prompt_tokens=5, completion_tokens=32, audio_tokens=30, cached_tokens=4, prompt_audio_tokens=3)
USAGE_BODY = {
    "prompt_tokens": 5,
    "completion_tokens": 32,
    "total_tokens": 37,
    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 3},
    "completion_tokens_details": {"text_tokens": 2, "audio_tokens": 30, "reasoning_tokens": 0},
}


def asked(**fields: Any) -> ChatRequest:
    body = {"model": "omni", "messages": [{"role": "user", "content": "hello"}], **fields}
    raw = json.dumps(body).encode()
    return open_chat_request(check_chat_request(raw, models=["omni"], voices=["Ethan"], limits=LIMITS), {}, LIMITS)


def spoken(**fields: Any) -> ChatRequest:
    return asked(audio={"voice": "Ethan"}, **fields)


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_a_spoken_stream() -> None:
    stream = ChatStream(
        spoken(stream=True, stream_options={"include_usage": True}),
        answer_id="chatcmpl-7",
        created=100,
        voice="Ethan",
    )
    chunks = [stream.start(), stream.text("Hi"), stream.audio(b"abcdef"), stream.text(" you"), stream.finish("stop")]
    usage = stream.usage(USAGE)
    head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 100, "model": "omni"}
    assert all(chunk.items() >= (head | {"usage": None}).items() for chunk in chunks)
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"content": "Hi", "audio": {"id": "audio-7", "voice": "Ethan", "transcript": "Hi"}},
        {"audio": {"data": base64.b64encode(b"abcdef").decode()}},
        {"content": " you", "audio": {"transcript": " you"}},
        {"audio": {"expires_at": 100}},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert [chunk.get("modality") for chunk in chunks] == [None, "text", "audio", "text", None]
    assert usage == head | {"choices": [], "usage": USAGE_BODY}


def test_a_stream_of_text_alone_says_nothing_of_audio_or_usage() -> None:
    stream = ChatStream(asked())
    chunks = [stream.start(), stream.text("Hi"), stream.finish("length")]
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hi"}, {}]
    assert all("usage" not in chunk and "system_fingerprint" not in chunk for chunk in chunks)
    assert stream.usage(USAGE) is None


def test_pictures_are_parts_of_the_content() -> None:
    request = asked(modalities=["text", "image"])
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}}
    assert ChatStream(request).image(b"PNG").items() >= {"modality": "image"}.items()
    assert deltas([ChatStream(request).image(b"PNG")]) == [{"content": [part]}]
    whole = completion(request, [Spoken("Hi", "stop", USAGE, images=[b"PNG"]), Spoken("", "stop", USAGE)])
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert contents == [[{"type": "text", "text": "Hi"}, part], [{"type": "text", "text": ""}]]


def test_ids_are_fresh_and_the_same_in_all_chunks() -> None:
    one, other = ChatStream(spoken()), ChatStream(spoken())
    assert one.start()["id"] == one.finish("stop")["id"] != other.start()["id"]
    assert one.id.startswith("chatcmpl-")


def test_a_spoken_completion_keeps_the_text_as_content() -> None:
    answers = [Spoken("Hi", "stop", USAGE, audio=b"RIFF")]
    body = completion(spoken(), answers, voice="Ethan", answer_id="chatcmpl-7", created=100)
    assert body == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 100,
        "model": "omni",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi",
                    "refusal": None,
                    "audio": {
                        "id": "audio-7",
                        "data": "UklGRg==",
                        "expires_at": 100,
                        "transcript": "Hi",
                        "voice": "Ethan",
                    },
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_BODY,
    }


def test_a_completion_of_text_alone_has_no_audio() -> None:
    body = completion(asked(), [Spoken("Hi", "length", USAGE)])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}


def told(token: str, value: float) -> TokenLogprob:
    return TokenLogprob(token, value, token.encode())


CHOICES = (
    TokenChoice(told("H", -0.5), (told("H", -0.5), told("é", -1.0), told("J", -2.0))),
    TokenChoice(told("i", -math.inf), (told("o", -0.1), told("i", -math.inf))),
)


def logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


@pytest.mark.parametrize("most", [0, 1, 2])
def test_logprobs_of_each_token_and_of_the_likeliest_in_its_place(most: int) -> None:
    request = asked(logprobs=True, top_logprobs=most)
    likeliest = [[logprob("H", -0.5), logprob("é", -1.0)], [logprob("o", -0.1), logprob("i", -9999.0)]]
    content = [
        logprob("H", -0.5) | {"top_logprobs": likeliest[0][:most]},
        logprob("i", -9999.0) | {"top_logprobs": likeliest[1][:most]},
    ]
    streamed = ChatStream(request).text("Hi", CHOICES)["choices"][0]["logprobs"]
    whole = completion(request, [Spoken("Hi", "stop", USAGE, choices=CHOICES)])
    assert streamed == whole["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    json.dumps(whole, allow_nan=False)


def test_a_part_of_a_character_has_its_own_bytes_and_no_text() -> None:
    choices = (TokenChoice(TokenLogprob("", -0.5, b"\xc3")), TokenChoice(TokenLogprob("é", -0.5, b"\xa9")))
    said = ChatStream(asked(logprobs=True)).text("é", choices)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in said] == [("", [0xC3]), ("é", [0xA9])]


def test_without_asking_there_are_no_logprobs() -> None:
    assert ChatStream(asked()).text("Hi", CHOICES)["choices"][0]["logprobs"] is None


def test_several_choices_have_places_sounds_and_one_usage() -> None:
    answers = [Spoken("Hi", "stop", USAGE, audio=b"a"), Spoken("Ho", "length", USAGE, audio=b"b")]
    body = completion(spoken(), answers, answer_id="chatcmpl-7")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["message"]["audio"]["id"] for choice in body["choices"]] == ["audio-7", "audio-7-1"]
    assert body["usage"] == Usage(5, 64, 60, 4, 3).body()
    stream = ChatStream(spoken(), answer_id="chatcmpl-7", index=1)
    chunk = stream.text("Ho")
    assert (chunk["choices"][0]["index"], chunk["choices"][0]["delta"]["audio"]["id"]) == (1, "audio-7-1")


def test_every_chunk_says_the_tokens_so_far_where_they_are_asked_for() -> None:
    request = asked(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    stream = ChatStream(request, used=lambda: USAGE)
    assert all(chunk["usage"] == USAGE_BODY for chunk in (stream.start(), stream.text("Hi"), stream.finish("stop")))


def test_calls_whole() -> None:
    calls = [Call("call-1", "weather", '{"place": "Oslo"}'), Call("call-2", "time", "{}")]
    body = completion(asked(), [Spoken("", "tool_calls", USAGE, calls=calls)])
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}},
            {"id": "call-2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


def test_calls_behind_text_keep_it() -> None:
    made = completion(asked(), [Spoken("So.", "tool_calls", USAGE, calls=[Call("1", "f", "{}")])])
    assert made["choices"][0]["message"]["content"] == "So."


def test_calls_streamed() -> None:
    stream = ChatStream(asked(stream=True))
    chunk = stream.calls([CallDelta(0, "call-1", "weather"), CallDelta(0, arguments='{"pl')])
    assert deltas([chunk]) == [
        {
            "tool_calls": [
                {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}},
                {"index": 0, "function": {"arguments": '{"pl'}},
            ]
        }
    ]
    assert stream.finish("tool_calls")["choices"][0]["finish_reason"] == "tool_calls"
