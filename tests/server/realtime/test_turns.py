"""Turns of a realtime session by the whole model: what it answers is what the chat API answers to the same."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from omni_cluster.openai_api.audio import pcm16, wav_bytes
from tests.engine.stages import until
from tests.http_app import MODEL
from tests.reference import synthetic_audio
from tests.server.local import LocalApp
from tests.server.realtime.talk import Talk, sound_of, talk, text_of

RATE_HZ = 24_000
TOKENS = 12
DELTA = "response.function_call_arguments.delta"
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def speech(seconds: float) -> np.ndarray:
    """Of the wire's rate."""
    return np.repeat(synthetic_audio(seconds), 3)[::2]


def part_of(samples: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(wav_bytes(samples, RATE_HZ)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def chatted(local: LocalApp, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": list(messages), "max_tokens": TOKENS, **fields}
    message: dict[str, Any] = local.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    return message


async def push_to_talk(client: Talk, samples: np.ndarray) -> None:
    sound = pcm16(samples)
    for start in range(0, len(sound), 9_600):
        await client.send("input_audio_buffer.append", audio=base64.b64encode(sound[start : start + 9_600]).decode())
    await client.send("input_audio_buffer.commit")
    await client.until("conversation.item.done")


async def test_a_spoken_turn_and_one_that_follows_are_answered_as_in_a_chat(local: LocalApp) -> None:
    first, system = speech(1.3), {"role": "system", "content": "Be brief."}
    async with talk(local.url) as client:
        await client.update(
            instructions="Be brief.", max_output_tokens=TOKENS, audio={"input": {"turn_detection": None}}
        )
        await push_to_talk(client, first)
        spoken = await client.answer()
        assert len(sound_of(spoken)) > 0 and np.abs(sound_of(spoken).astype(int)).max() > 0
        spoken_turn = {"role": "user", "content": [part_of(first)]}
        assert text_of(spoken) == chatted(local, system, spoken_turn)["content"]
        await client.say("And now?")
        followed = await client.answer(output_modalities=["text"])
        answer, question = {"role": "assistant", "content": text_of(spoken)}, {"role": "user", "content": "And now?"}
        assert text_of(followed) == chatted(local, system, spoken_turn, answer, question)["content"]
        usage = followed[-1]["response"]["usage"]
        assert usage["input_token_details"]["audio_tokens"] > 0 and usage["output_token_details"]["audio_tokens"] == 0
    await until(local.nothing_is_left)


async def test_the_oldest_spoken_turn_is_left_out_where_all_are_too_long(local: LocalApp) -> None:
    """Only the thinker's stage counts the tokens of media."""
    turns = [speech(25.0 + i) for i in range(3)]
    async with talk(local.url) as client:
        text_alone = {"max_output_tokens": TOKENS, "output_modalities": ["text"]}
        await client.update(**text_alone, audio={"input": {"turn_detection": None}})
        for turn in turns:
            await push_to_talk(client, turn)
        answered = await client.answer()
        assert answered[-1]["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        latest = [{"role": "user", "content": [part_of(turn)]} for turn in turns[1:]]
        assert text_of(answered) == chatted(local, *latest)["content"]
        await client.update(truncation="disabled")
        await client.send("response.create")
        refused = (await client.until("error"))[-1]["error"]
        assert refused["code"] == "context_length_exceeded" and "maximum context length" in refused["message"]
    await until(local.nothing_is_left)


async def test_what_was_not_heard_is_not_in_the_next_prompt(local: LocalApp) -> None:
    async with talk(local.url) as client:
        await client.update(max_output_tokens=TOKENS, output_modalities=["audio"])
        await client.say("Hello")
        spoken = await client.answer()
        item = spoken[-1]["response"]["output"][0]
        await client.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=0)
        await client.say("And now?")
        followed = await client.answer(output_modalities=["text"])
    turns = [{"role": "user", "content": text} for text in ("Hello", "And now?")]
    assert text_of(followed) == chatted(local, *turns)["content"]


async def test_a_tool_is_called_and_its_output_answered(local: LocalApp) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    async with talk(local.url) as client:
        await client.update(tools=[tool], output_modalities=["text"], max_output_tokens=100)
        await client.say("How is the weather?")
        events = await client.answer(tool_choice="required")
        call = events[-1]["response"]["output"][0]
        function = {"name": "weather", "parameters": WEATHER}
        asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 100}
        wanted = chatted(local, {"role": "user", "content": "How is the weather?"}, **asked)["tool_calls"][0][
            "function"
        ]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", wanted["arguments"])
        pieces = [each["delta"] for each in events if each["type"] == DELTA and each["item_id"] == call["id"]]
        assert "".join(pieces) == call["arguments"]
        await client.create({"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."})
        assert (await client.answer(tool_choice="none"))[-1]["response"]["status"] in ("completed", "incomplete")
