"""The API on a cluster as its clients use it: OpenAI's SDK and curl, with nothing changed but the address."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.http_app import MODEL, STREAM_TOLERANCE, nothing_is_left
from tests.openai_api.forms import sound
from tests.served.app import BASE_URL, ServedApp, until
from tests.server.sdk import QUESTION, audio_delta, spoken, streamed_pieces, wav_samples, whole_samples


@pytest.fixture
def client(served: ServedApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(served: ServedApp) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_streamed_answer_has_the_samples_of_the_whole_one(client: OpenAI) -> None:
    # Long enough that an ingress which stands still for a while gets more than one piece all the same.
    pieces = streamed_pieces(client, codes=300)
    joined, whole = np.concatenate(pieces), whole_samples(client, codes=300)
    assert len(pieces) > 1 and joined.shape == whole.shape
    assert np.abs(joined.astype(int) - whole).max() <= STREAM_TOLERANCE * 32768


def test_refusals_are_the_sdk_s_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**spoken("wav") | {"audio": {"voice": "Bob", "format": "wav"}})
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "audio.voice",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id and "Chelsie, Ethan" in bad.value.message
    with pytest.raises(openai.BadRequestError, match="speed is 2"):
        client.audio.speech.create(model=MODEL, voice="Ethan", input="Hi.", speed=2)
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nobody", messages=QUESTION, stream=stream)
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as nowhere:
        client.embeddings.create(model=MODEL, input="Hi.")
    assert nowhere.value.code == "unknown_url"


def test_a_sound_is_written_down_and_a_text_is_gone_on_with(client: OpenAI) -> None:
    file, more = ("a.wav", sound(0.5)), {"max_completion_tokens": 8}
    heard = client.audio.transcriptions.create(model=MODEL, file=file, extra_body=more)
    *_, done = client.audio.transcriptions.create(model=MODEL, file=file, extra_body=more, stream=True)
    assert heard.text and done.type == "transcript.text.done" and done.text == heard.text
    whole = client.completions.create(model=MODEL, prompt="Hello", temperature=0).choices[0].text
    pieces = client.completions.create(model=MODEL, prompt="Hello", temperature=0, stream=True)
    assert whole and "".join(piece.choices[0].text for piece in pieces) == whole


STORY = [{"role": "user", "content": "A long story. " * 60}]
STORY_CODES = 2048
STEPS_LEFT_UNMADE = STORY_CODES // 8
"""A talker makes 8 codes a step at most: with fewer steps than that, it was stopped."""


@pytest.mark.parametrize("after", ["first text", "first sound"])
async def test_a_stream_that_is_closed_early_is_stopped_in_every_stage(
    served: ServedApp, async_client: AsyncOpenAI, after: str
) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before = await talker_steps(served)
    asked = spoken("pcm16", codes=STORY_CODES) | {"messages": STORY}
    async with await async_client.chat.completions.create(**asked, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content if after == "first text" else audio_delta(chunk).get("data"):
                break
    await until(lambda: nothing_is_left(served), "all stages let go of the request")
    assert await talker_steps(served) - before < STEPS_LEFT_UNMADE


async def talker_steps(served: ServedApp) -> int:
    return sum(status["engine"]["steps"] for status in await served.statuses_of("talker"))


def curl(*arguments: str, body: dict[str, Any], path: str) -> bytes:
    program = shutil.which("curl")
    assert program is not None, "curl is not installed"
    command = [program, "-sS", "--fail-with-body", f"{BASE_URL}{path}", "-H", "Content-Type: application/json"]
    made = subprocess.run([*command, *arguments, "-d", json.dumps(body)], capture_output=True, timeout=120, check=False)
    assert made.returncode == 0, (made.stderr, made.stdout)
    return made.stdout


def test_curl(served: ServedApp, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 6}
    whole = json.loads(curl(body=asked, path="/v1/chat/completions"))["choices"][0]["message"]["content"]
    streamed = curl("-N", body=asked | {"stream": True}, path="/v1/chat/completions").decode()
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert whole and "".join(delta.get("content", "") for delta in deltas) == whole
    path = tmp_path / "speech.wav"
    speech = {"model": MODEL, "input": "Good morning.", "voice": "Chelsie", "response_format": "wav"}
    assert curl("-o", str(path), body=speech, path="/v1/audio/speech") == b""
    assert len(wav_samples(path.read_bytes())) > 0


def test_curl_gets_a_stream_while_it_is_made(served: ServedApp) -> None:
    asked = spoken("pcm16", codes=STORY_CODES) | {"stream": True}
    body = json.dumps(asked | asked.pop("extra_body"))
    program = shutil.which("curl")
    assert program is not None, "curl is not installed"
    command = [program, "-sSN", f"{BASE_URL}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert '"role":"assistant"' in running.stdout.readline()
        assert running.poll() is None
        running.terminate()
