"""Spoken items that wait to be written down: what they hold is bounded, and each is told how it ends."""

from __future__ import annotations

import base64
import gc
from pathlib import Path

import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.openai_api.realtime.items import Item
from tests.server.realtime.room import talking
from tests.server.realtime.spoken import silence, until
from tests.server.realtime.talk import Talk
from tests.server.speaker import Speaker

pytestmark = pytest.mark.usefixtures("tiny")
EVENT = "conversation.item.input_audio_transcription"
FIT = 4
SECOND_BYTES = 16_000 * 4


async def written(client: Talk) -> None:
    await client.update(audio={"input": {"turn_detection": None, "transcription": {"model": "x"}}})


async def commit(client: Talk) -> str:
    """A second of sound. Returns the item's id."""
    await client.send("input_audio_buffer.append", audio=base64.b64encode(silence(1.0).tobytes()).decode())
    await client.send("input_audio_buffer.commit")
    item_id: str = (await client.until("conversation.item.done"))[-1]["item"]["id"]
    return item_id


async def first_of_two(client: Talk, speaker: Speaker) -> str:
    """The first is being written down, as long as the speaker may not speak. Returns the id of the one that waits."""
    speaker.may_speak.clear()
    await written(client)
    await commit(client)
    await until(lambda: speaker.running == 1)
    return await commit(client)


def told(client: Talk, end: str) -> list[str]:
    return [event["item_id"] for event in client.told if event["type"] == f"{EVENT}.{end}"]


async def test_items_that_left_the_conversation_are_given_up(tmp_path: Path) -> None:
    async with talking(tmp_path, Limits(max_session_bytes=(FIT + 1) * SECOND_BYTES - 1)) as (client, speaker):
        speaker.may_speak.clear()
        await written(client)
        first = await commit(client)
        await until(lambda: speaker.running == 1)
        others = [await commit(client) for _ in range(2 * FIT + 1)]
        gone, kept = others[: FIT + 1], others[FIT + 1 :]
        while len(told(client, "failed")) < len(gone):
            assert (await client.next())["error"]["message"].startswith("The item left the conversation")
        gc.collect()
        # Those of the conversation, and the one that is being written down.
        assert len([each for each in gc.get_objects() if type(each) is Item]) == FIT + 1
        speaker.may_speak.set()
        while len(told(client, "completed")) < 1 + len(kept):
            await client.next()
        assert (told(client, "failed"), told(client, "completed")) == (gone, [first, *kept])


async def test_an_item_that_was_deleted_is_not_written_down(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        second = await first_of_two(client, speaker)
        await client.send("conversation.item.delete", item_id=second)
        await client.until("conversation.item.deleted")
        speaker.may_speak.set()
        failed = (await client.until(f"{EVENT}.failed"))[-1]
        assert failed["item_id"] == second and failed["error"]["code"] == "item_not_transcribed"


async def test_an_item_whose_transcription_is_turned_off_is_told_so(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        second = await first_of_two(client, speaker)
        await client.update(audio={"input": {"transcription": None}})
        speaker.may_speak.set()
        failed = (await client.until(f"{EVENT}.failed"))[-1]
        assert failed["item_id"] == second and "turned off" in failed["error"]["message"]
