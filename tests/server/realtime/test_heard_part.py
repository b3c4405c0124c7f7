"""What later prompts have of an answer that was interrupted, over a pipeline that reads a long text aloud."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.serve_local import listening, serving
from omni_cluster.server.realtime.outlet import Outlet
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.server.keyed import config_of
from tests.server.realtime.spoken import sentences, silence
from tests.server.realtime.talk import Talk, talk
from tests.server.speaker import RATE_HZ, Speaker

pytestmark = pytest.mark.usefixtures("tiny")

WORDS, LASTS_S = 200, 100.0
WORDS_PER_S = WORDS / LASTS_S
TEXT = " ".join(islice(map("".join, product("BDFGK", repeat=4)), WORDS))
SILENT_S = 1.0
"""Before the first word, and behind the last one."""
KEPT_BACK_S = 3.0
"""More than the time from there to the interruption."""
PATIENCE_S = 60


class Reader(Speaker):
    """Says `TEXT`, each word in the same time, all of it at once; its answer ends when it may."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.prompts: list[str] = []
        self.has_read = asyncio.Event()

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        self.prompts.append(request.prompt if isinstance(request.prompt, str) else request.prompt.text)
        yield StageEvent("thinker", StageChunk(token_ids=(1,), text=TEXT, prompt_token_ids=(1, 2)))
        if request.wants_audio:
            yield StageEvent("code2wav", StageChunk(audio=AudioChunk(0, reading(), RATE_HZ)))
            self.has_read.set()
        async with deadline.kept():
            await self.may_speak.wait()
        yield StageEvent("thinker", StageChunk(token_start=1, finish_reason="stop"))


def reading() -> np.ndarray:
    times = np.arange(int(LASTS_S * RATE_HZ)) / RATE_HZ
    return np.pad(0.1 * np.sin(2 * np.pi * 200 * times), int(SILENT_S * RATE_HZ)).astype(np.float32)


@asynccontextmanager
async def read_to(folder: Path) -> AsyncIterator[tuple[Talk, Reader]]:
    reader = Reader(config_of(folder))
    with listening("127.0.0.1", 0) as listener:
        async with serving(reader, listener) as server, talk(server.url) as client:
            await client.until("session.created")
            yield client, reader


async def begun(client: Talk) -> str:
    """The id of an answer, once all of its sound has come."""
    await client.say("Read it to me.")
    await client.send("response.create")
    return str((await client.until("response.output_audio.delta"))[-1]["item_id"])


async def truncate(client: Talk, item_id: str, played_s: float) -> None:
    fields = {"item_id": item_id, "content_index": 0, "audio_end_ms": round(1000 * played_s)}
    await client.send("conversation.item.truncate", **fields)
    await client.until("conversation.item.truncated")


async def speak(client: Talk, *parts: np.ndarray) -> None:
    for piece in np.split(samples := np.concatenate(parts), range(2400, len(samples), 2400)):
        await client.send("input_audio_buffer.append", audio=base64.b64encode(piece.tobytes()).decode())


async def remembered(client: Talk, reader: Reader, item_id: str) -> int:
    """How many words of the answer a prompt with it has: out of band, which leaves the conversation as it is."""
    reader.may_speak.set()
    wanted = [{"type": "item_reference", "id": item_id}, user_said("And now?")]
    await client.answer(conversation="none", input=wanted, output_modalities=["text"])
    kept = re.findall("[BDFGK]{4}", reader.prompts[-1])
    assert kept == TEXT.split()[: len(kept)]
    return len(kept)


def user_said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_of_a_whole_answer_the_client_s_time_is_taken_at_the_answer_s_own_pace(tmp_path: Path) -> None:
    async with read_to(tmp_path) as (client, reader):
        item_id = await begun(client)
        await client.until("response.done")
        wanted = {0: 0, SILENT_S: 0, SILENT_S + 10.3: 21, SILENT_S + 10.2: 20, SILENT_S + LASTS_S: WORDS, 1000: WORDS}
        for played_s, words in wanted.items():
            await truncate(client, item_id, played_s)
            assert await remembered(client, reader, item_id) == words, played_s


async def test_of_an_answer_that_speech_cuts_off_later_prompts_have_what_was_played_by_then(tmp_path: Path) -> None:
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        reader.may_speak.clear()
        asked_s = time.monotonic()
        item_id = await begun(client)
        await speak(client, first, silence(0.1))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        most_s = time.monotonic() - asked_s
        assert await remembered(client, reader, item_id) <= WORDS_PER_S * max(0.0, most_s - SILENT_S) + 1 < WORDS
        await truncate(client, item_id, SILENT_S + 50)  # what the client says is exact
        assert await remembered(client, reader, item_id) == 100


async def test_an_answer_that_ends_while_its_interruption_is_sent_is_cut_to_what_was_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, has_ended = Outlet.send, asyncio.Event()

    async def slowly(self: Outlet, kind: str, **fields: Any) -> int:
        sent = await plain(self, kind, **fields)
        if kind == "response.done":
            has_ended.set()
        if kind == "input_audio_buffer.speech_started":
            await asyncio.wait_for(has_ended.wait(), PATIENCE_S)
            await asyncio.sleep(0.1)  # in which the session hears of that end
        return sent

    monkeypatch.setattr(Outlet, "send", slowly)
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        reader.may_speak.clear()
        item_id = await begun(client)
        await speak(client, first, silence(0.1))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        assert await remembered(client, reader, item_id) < WORDS


async def test_what_the_client_says_before_it_speaks_stays(tmp_path: Path) -> None:
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        reader.may_speak.clear()
        item_id = await begun(client)
        await truncate(client, item_id, SILENT_S + 50)
        await speak(client, first, silence(0.1))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        assert await remembered(client, reader, item_id) == 100


async def test_what_was_kept_back_of_an_answer_is_played_once_the_turn_is_over(tmp_path: Path) -> None:
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        await client.update(audio={"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 1_000}}})
        reader.may_speak.clear()
        await speak(client, first, silence(0.5))
        await asyncio.wait_for(reader.has_read.wait(), PATIENCE_S)
        await asyncio.sleep(KEPT_BACK_S)
        released_s = time.monotonic()
        await speak(client, silence(0.8))
        item_id = (await client.until("response.output_audio.delta"))[-1]["item_id"]
        await speak(client, first, silence(0.1))
        await client.until("response.done")
        most_s = time.monotonic() - released_s
        assert await remembered(client, reader, item_id) <= WORDS_PER_S * max(0.0, most_s - SILENT_S) + 1


async def test_an_answer_in_text_alone_is_remembered_as_far_as_it_was_written(tmp_path: Path) -> None:
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        reader.may_speak.clear()
        await client.say("Write it to me.")
        await client.send("response.create", response={"output_modalities": ["text"]})
        item_id = (await client.until("response.output_text.delta"))[-1]["item_id"]
        await speak(client, first, silence(0.1))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        assert await remembered(client, reader, item_id) == WORDS


async def test_an_answer_that_speech_does_not_interrupt_is_remembered_whole(tmp_path: Path) -> None:
    first, _ = sentences()
    async with read_to(tmp_path) as (client, reader):
        detection = {"type": "server_vad", "interrupt_response": False, "create_response": False}
        await client.update(audio={"input": {"turn_detection": detection}})
        reader.may_speak.clear()
        item_id = await begun(client)
        await speak(client, first, silence(0.1))
        await client.until("input_audio_buffer.speech_started")
        reader.may_speak.set()
        await client.until("response.done")
        assert await remembered(client, reader, item_id) == WORDS
