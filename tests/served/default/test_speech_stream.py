"""Speech of text that comes in pieces, from the cluster: each sentence has the sound of a request of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.http_app import STREAM_TOLERANCE, WAVE_TOLERANCE, nothing_is_left
from tests.served.app import BASE_URL, ServedApp, until
from tests.server.speech.reciter import telling


def posted(served: ServedApp, text: str, **fields: Any) -> bytes:
    body = {"model": served.model, "input": text, **fields}
    answer = served.client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize(("voice", "stream"), [("Ethan", False), ("Chelsie", True)])
async def test_each_sentence_has_the_sound_of_a_request_of_its_own(served: ServedApp, voice: str, stream: bool) -> None:
    fields: dict[str, Any] = {"voice": voice, "response_format": "pcm", "seed": 5}
    async with telling(BASE_URL, stream_audio=stream, **fields) as client:
        await client.tell("Good ", "morn", "ing. How are", " you? I am")
        said = [await client.sentence(), await client.sentence(), *await client.text()]
    assert [each.start["sentence_text"] for each in said] == ["Good morning.", "How are you?", "I am"]
    # The pieces of a sentence are one where the ingress stood still while it was spoken.
    assert (max(len(each.frames) for each in said) > 1) == stream
    for each in said:
        sound = await asyncio.to_thread(posted, served, each.start["sentence_text"], stream=stream, **fields)
        got, wanted = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (each.sound, sound))
        assert len(got) == len(wanted) > 0
        assert np.abs(got - wanted).max() <= (STREAM_TOLERANCE if stream else WAVE_TOLERANCE) * 32_768


async def test_a_client_that_leaves_ends_its_sentences(served: ServedApp) -> None:
    async with telling(BASE_URL, stream_audio=True, response_format="pcm") as client:
        await client.tell("A long story is told here, word by word, to all that have the time for it. " * 4)
        assert (await client.next())["type"] == "audio.start"
        assert isinstance(await client.next(), bytes)

    async def is_free() -> bool:
        return await nothing_is_left(served)

    await until(is_free, "no stage has anything of it")
