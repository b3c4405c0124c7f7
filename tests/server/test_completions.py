"""Texts that are gone on with as they are, their tokens, and the text of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.engine.stages import until
from tests.http_app import MODEL, events
from tests.server.local import LocalApp

COMPLETIONS = "/v1/completions"
CHAT_PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me."}]


@pytest.fixture
def client(local: LocalApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def posted(local: LocalApp, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return local.client.post(path, json={"model": MODEL, **fields})


def completed(local: LocalApp, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = posted(local, prompt=prompt, **{"temperature": 0, "max_tokens": 8, **fields})
    made: dict[str, Any] = answer.raise_for_status().json()
    return made


def test_marks_of_a_prompt_are_the_template_s(local: LocalApp) -> None:
    chat = posted(local, "/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=8).json()
    made = completed(local, CHAT_PROMPT)
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"]) == (
        chat["choices"][0]["message"]["content"], chat["choices"][0]["finish_reason"],
    )  # fmt: skip
    assert made["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert (made["object"], made["model"]) == ("text_completion", MODEL)


def test_a_text_and_its_tokens_are_the_same_prompt(local: LocalApp) -> None:
    tokens = posted(local, "/tokenize", prompt="Hello world").json()["tokens"]
    text, ids = completed(local, "Hello world", echo=True), completed(local, tokens, echo=True)
    assert text["choices"] == ids["choices"] and text["choices"][0]["text"].startswith("Hello world")


def test_each_prompt_has_its_choices_in_order(local: LocalApp) -> None:
    prompts = ["Hello", "Describe the image."]
    alone = [completed(local, prompt)["choices"][0]["text"] for prompt in prompts]
    made = completed(local, prompts, n=2)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in made["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    counts = [
        len(posted(local, "/tokenize", prompt=prompt).json()["tokens"]) for prompt in ("Hello", "Describe the image.")
    ]
    assert made["usage"]["prompt_tokens"] == sum(counts)


def test_choices_of_a_seed_differ_and_come_again(local: LocalApp) -> None:
    options = {"n": 3, "seed": 11, "temperature": 1.5, "max_tokens": 12}
    first, again = (completed(local, "Hello", **options)["choices"] for _ in range(2))
    assert first == again and len({choice["text"] for choice in first}) == 3


def test_openai_s_client_reads_a_stream(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": ["Hello", "world"], "max_tokens": 8, "logprobs": 2, "seed": 3}
    whole = client.completions.create(**options)
    texts, told, ends = ["", ""], [[], []], {}  # type: ignore[var-annotated]
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            told[choice.index] += (choice.logprobs.tokens or []) if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == [choice.text for choice in whole.choices]
    assert told == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_logprobs_are_those_of_the_chat(local: LocalApp) -> None:
    options = {"temperature": 0, "max_tokens": 8}
    chat = posted(local, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2, **options).json()
    content = chat["choices"][0]["logprobs"]["content"]
    told = completed(local, CHAT_PROMPT, logprobs=2)["choices"][0]["logprobs"]
    assert told["tokens"] == [one["token"] for one in content]
    assert told["token_logprobs"] == pytest.approx([one["logprob"] for one in content])
    assert all(len(top) <= 3 for top in told["top_logprobs"])
    assert told["text_offset"][:2] == [0, len(told["tokens"][0])]


@pytest.mark.parametrize("fields", [{"stop": "e"}, {"max_tokens": 3}, {"min_tokens": 4, "max_tokens": 4}])
def test_a_stream_is_the_whole_answer_in_pieces(local: LocalApp, fields: dict[str, Any]) -> None:
    whole = completed(local, "Describe the audio.", echo=True, **fields)["choices"][0]
    answer = posted(
        local, prompt="Describe the audio.", echo=True, stream=True, **{"temperature": 0, "max_tokens": 8, **fields}
    )
    pieces = [event["choices"][0] for event in events(answer)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]


async def test_a_client_that_leaves_ends_all_choices(local: LocalApp) -> None:
    body = {"model": MODEL, "prompt": ["Hello"] * 8, "max_tokens": 200, "temperature": 1.5, "stream": True}
    async with (
        httpx.AsyncClient(base_url=local.url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=body) as answer,
    ):
        await anext(answer.aiter_lines())
    async with asyncio.timeout(60):
        await until(local.nothing_is_left)


@pytest.mark.parametrize("mark", ["<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"])
def test_marks_of_media_are_refused(local: LocalApp, mark: str) -> None:
    refused = posted(local, prompt=["Hello", f"{mark} Hello"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert mark in refused.json()["error"]["message"]


def test_other_marks_in_any_order_end_no_engine(local: LocalApp) -> None:
    for prompt in ("<|vision_bos|>", "<|audio_bos|><|audio_eos|>", "<|im_end|>" * 9, "<|endoftext|>"):
        completed(local, prompt, max_tokens=2)
    completed(local, [511, 500, 479], max_tokens=2)


async def test_tokens_are_those_that_the_engine_reads_and_no_engine_is_asked(local: LocalApp) -> None:
    chat = posted(local, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    await until(local.nothing_is_left)
    before = await local.work_done()
    made = posted(local, "/tokenize", messages=MESSAGES, return_token_strs=True).json()
    assert made["count"] == len(made["tokens"]) == chat["usage"]["prompt_tokens"]
    assert made["max_model_len"] == 2048 and len(made["token_strs"]) == made["count"]
    assert made["token_strs"][0] == "<|im_start|>"
    assert posted(local, "/detokenize", tokens=made["tokens"]).json() == {"prompt": CHAT_PROMPT}
    assert local.client.post("/tokenize", json={"prompt": CHAT_PROMPT}).json()["tokens"] == made["tokens"]
    assert await local.work_done() == before


def test_a_token_that_is_none_is_refused(local: LocalApp) -> None:
    error = posted(local, "/detokenize", tokens=[1, 512]).json()["error"]
    assert (error["param"], error["message"]) == ("tokens[1]", "tokens[1] is 512, but the model's tokens are 0 to 511.")
