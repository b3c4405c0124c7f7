"""The API as its clients use it, OpenAI's SDK and DashScope's samples, with nothing changed but the address."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from openai import AsyncOpenAI, OpenAI

from tests.http_app import MODEL, STREAM_TOLERANCE, WAVE_TOLERANCE, as_parts
from tests.server.local import LocalApp
from tests.server.sdk import (
    CODES,
    QUESTION,
    SAMPLE_RATE_HZ,
    audio_delta,
    spoken,
    streamed_pieces,
    wav_samples,
    whole_samples,
)


@pytest.fixture
def client(local: LocalApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


SAMPLES_A_CODE = 480


@pytest.fixture
async def async_client(local: LocalApp) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=6)
    assert answer.object == "chat.completion" and answer.model == MODEL
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.message.audio is None
    assert choice.finish_reason == "length" and answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


async def test_a_streamed_text_is_the_whole_one_and_ends_with_its_usage(async_client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12}
    whole = await async_client.chat.completions.create(**asked)
    stream = await async_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


async def test_answers_at_once_by_one_client(async_client: AsyncOpenAI) -> None:
    asked = [spoken("wav", seed=seed) for seed in (1, 2, 1)]
    answers = await asyncio.gather(*[async_client.chat.completions.create(**each) for each in asked])
    first, other, again = (wav_samples(base64.b64decode(a.choices[0].message.audio.data)).astype(int) for a in answers)
    # A batch is computed in another order than a request alone: the last bits differ.
    assert np.abs(first - again).max() <= WAVE_TOLERANCE * 32768
    assert np.abs(first - other).max() > 100 * WAVE_TOLERANCE * 32768


def test_a_whole_answer_is_heard_and_a_seed_repeats_it(client: OpenAI) -> None:
    first, again, other = (client.chat.completions.create(**spoken("wav", seed=seed)) for seed in (3, 3, 4))
    audio = first.choices[0].message.audio
    assert audio.transcript == first.choices[0].message.content and audio.id and audio.expires_at
    assert len(wav_samples(base64.b64decode(audio.data))) == SAMPLES_A_CODE * CODES
    assert first.usage.completion_tokens_details.audio_tokens == CODES
    assert again.choices[0].message.audio.data == audio.data
    assert other.choices[0].message.audio.data != audio.data


async def test_a_stream_s_deltas_have_the_sdk_s_types(async_client: AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(**spoken("pcm16"), stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    audios = [delta.audio for delta in deltas if delta.audio is not None]
    assert deltas[0].role == "assistant"
    text = "".join(delta.content or "" for delta in deltas)
    assert text and "".join(audio.transcript or "" for audio in audios) == text
    assert [bool(audio.id) for audio in audios] == [True] + [False] * (len(audios) - 1) and audios[-1].expires_at
    assert sum(len(base64.b64decode(audio.data)) for audio in audios if audio.data) == 2 * SAMPLES_A_CODE * CODES


def test_the_raw_body_of_a_stream(client: OpenAI) -> None:
    asked = spoken("pcm16") | {"stream": True}
    with client.chat.completions.with_streaming_response.create(**asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream") and response.headers["x-request-id"]
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
    with client.chat.completions.with_streaming_response.create(**spoken("wav")) as response:
        assert response.parse().choices[0].message.audio.data


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "pcm"])
def test_a_text_is_spoken_into_a_file(client: OpenAI, tmp_path: Path, audio_format: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "voice": "Chelsie", "input": "Good morning.", "extra_body": {"seed": 5}}
    path = tmp_path / f"speech.{audio_format}"
    sent = client.audio.speech.with_streaming_response.create(**asked, response_format=audio_format)
    with sent as response, path.open("wb") as file:
        for piece in response.iter_bytes(4096):
            file.write(piece)
    num_samples = len(client.audio.speech.create(**asked, response_format="pcm").content) // 2
    assert num_samples > 0 and num_samples % SAMPLES_A_CODE == 0
    assert decoded_samples(path, audio_format) == num_samples


def decoded_samples(path: Path, audio_format: str) -> int:
    if audio_format == "pcm":
        return path.stat().st_size // 2
    with av.open(str(path)) as container:
        frames = list(container.decode(audio=0))
    assert {(frame.sample_rate, frame.layout.nb_channels) for frame in frames} == {(SAMPLE_RATE_HZ, 1)}
    return sum(frame.samples for frame in frames)


def test_media_in_a_message(client: OpenAI) -> None:
    def prompt_tokens(kind: str) -> int:
        content: Any = as_parts(kind)
        messages = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        assert answer.choices[0].message.content is not None and answer.usage is not None
        return answer.usage.prompt_tokens

    text, image, audio, both = (prompt_tokens(kind) for kind in ("text", "image", "audio", "audio+image"))
    assert image > text and audio > text
    assert both - text == (image - text) + (audio - text)


def test_the_list_of_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert model.to_dict()["voices"] == ["Chelsie", "Ethan"]
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt/5")


def test_dashscope_s_sample(client: OpenAI) -> None:
    """Its loop, its format and its way to decode: all base64 is joined first. The other way gives the same."""
    completion = client.chat.completions.create(**spoken("wav"), stream=True, stream_options={"include_usage": True})
    chunks = list(completion)
    audio_string = ""
    for chunk in chunks:
        if chunk.choices:
            audio = audio_delta(chunk)
            if audio:
                audio_string += audio.get("data", "")
        else:
            usage = chunk.usage
    audio_np = np.frombuffer(base64.b64decode(audio_string), dtype=np.int16)
    each = [base64.b64decode(audio_delta(chunk).get("data", "")) for chunk in chunks]
    np.testing.assert_array_equal(np.frombuffer(b"".join(each), dtype=np.int16), audio_np)
    assert sum(map(bool, each)) > 1
    whole = whole_samples(client)
    assert audio_np.shape == whole.shape
    assert np.abs(audio_np.astype(int) - whole).max() <= STREAM_TOLERANCE * 32768
    assert usage is not None and usage.completion_tokens_details.audio_tokens == CODES


# A period of the tiny checkpoint's sound: it repeats itself nearly, each 10 ms frame like the one before.
FRAME = 240


def changes_of_frames(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root mean square of each frame's difference from the one before it."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    return np.sqrt(np.square(np.diff(frames, axis=0)).mean(axis=1))


def steps_of_samples(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.abs(np.diff(samples))


def is_smooth(samples: NDArray[np.float64], borders: Iterable[int]) -> bool:
    """Whether no border stands out: from sample to sample, and from frame to frame, which hears a lost sample too."""
    at = np.array(list(borders))
    return _within(steps_of_samples(samples), at - 1) and _within(changes_of_frames(samples), at // FRAME - 1)


def _within(values: NDArray[np.float64], at: NDArray[np.int64]) -> bool:
    """Whether those at the borders are about as large as those inside; a border may fall on one of the larger ones."""
    return bool(values[at].max() <= 1.5 * np.quantile(np.delete(values, at), 0.99))


def faded_in(samples: NDArray[np.float64], start: int, length: int) -> NDArray[np.float64]:
    faded = samples.copy()
    faded[start : start + length] *= np.linspace(0, 1, length)
    return faded


def test_pieces_join_without_a_click(client: OpenAI) -> None:
    pieces = streamed_pieces(client, codes=400)
    samples = np.concatenate(pieces).astype(float)
    borders = np.cumsum([len(piece) for piece in pieces])[:-1]
    assert len(borders) >= 4 and len(samples) == SAMPLES_A_CODE * 400
    assert is_smooth(samples, borders)
    for border in borders:
        before, after = samples[:border], samples[border:]
        assert not is_smooth(np.concatenate([before, after[1:], after[-1:]]), borders), "a sample was lost"
        assert not is_smooth(np.concatenate([before, after[:1], after[:-1]]), borders), "a sample came twice"
        assert not is_smooth(np.concatenate([before, -after]), borders), "the sound was turned over"
        assert not is_smooth(faded_in(samples, border, 2 * FRAME), borders), "a piece was faded in"
        assert not is_smooth(faded_in(samples[::-1], len(samples) - border, 2 * FRAME)[::-1], borders), "faded out"
