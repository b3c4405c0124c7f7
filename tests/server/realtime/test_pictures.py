"""Pictures in a conversation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.openai_api.decoders import DecoderLimits
from omni_cluster.server import reader
from omni_cluster.server.limits import decoder_limits
from tests.openai_api.parts import png_of
from tests.server.realtime.room import talking

pytestmark = pytest.mark.usefixtures("tiny")


def picture(width: int, height: int) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": png_of("red", (width, height))}
    return {"type": "message", "role": "user", "content": [part]}


async def test_a_picture_of_a_conversation_holds_up_no_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(config: PipelineConfig) -> DecoderLimits:
        return dataclasses.replace(decoder_limits(config), max_held_bytes=100 * 100 * 3)

    monkeypatch.setattr(reader, "decoder_limits", limits)
    async with talking(tmp_path) as (client, _):
        first = await client.create(picture(100, 100))
        second = await client.create(picture(10, 10))
        assert second["previous_item_id"] == first["item"]["id"]


async def test_a_picture_that_has_no_room_is_refused_and_the_conversation_stays(tmp_path: Path) -> None:
    async with talking(tmp_path, Limits(max_session_bytes=20_000)) as (client, _):
        await client.say("Remember me.", id="mine")
        await client.send("conversation.item.create", item=picture(100, 100))
        error = await client.refused()
        assert error["code"] == "item_too_large" and "20000" in error["message"]
        assert (await client.say("And me."))["previous_item_id"] == "mine"


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("data:image/png;base64,AAAA", "unsupported_image", " is not a readable image"),
        ("a.png", "invalid_value", ' is "a.png", but it should be'),
        ("ftp://media.example.org/a.png", "invalid_value", " is "),
        ("http://127.0.0.1/a.png", "url_forbidden", " is on 127.0.0.1"),
        ("", "invalid_value", " is "),
    ],
)
async def test_a_picture_that_is_refused_is_named_as_the_client_sent_it(
    tmp_path: Path, url: str, code: str, words: str
) -> None:
    content = [{"type": "input_text", "text": "Look."}, *picture(10, 10)["content"]]
    content.append({"type": "input_image", "image_url": url})
    async with talking(tmp_path) as (client, _):
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        error = await client.refused()
    assert (error["param"], error["code"]) == ("item.content[2].image_url", code)
    assert error["message"].startswith(f"item.content[2].image_url{words}") and "messages" not in error["message"]
