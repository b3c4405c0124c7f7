from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.inputs import Media, OmniRequest
from omni_cluster.models.qwen2_5_omni.thinker import ThinkerSession, multi_modal_data
from tests.reference import synthetic_image

AUDIO = np.zeros(160, np.float32)


async def test_text_prompt_has_no_media() -> None:
    made = await ThinkerSession(OmniRequest("r", "Hello")).prompt()
    assert made.prompt == {"prompt": "Hello"}
    assert made.rows_complete


@pytest.mark.parametrize("wants_audio", [True, False])
async def test_rows_are_made_for_requests_that_want_audio_and_only_they_miss_the_prefix_cache(
    wants_audio: bool,
) -> None:
    made = await ThinkerSession(OmniRequest("r", "Hello", wants_audio=wants_audio)).prompt()
    assert made.emit_rows == wants_audio
    assert made.sampling == ({"skip_reading_prefix_cache": True} if wants_audio else {})


async def test_media_keep_their_order() -> None:
    first, second, image = AUDIO, AUDIO + 1, synthetic_image()
    made = await ThinkerSession(OmniRequest("r", "Hello", Media((first, second), (image,)))).prompt()
    data = made.prompt["multi_modal_data"]
    assert [(audio is given, rate) for (audio, rate), given in zip(data["audio"], (first, second), strict=True)] == [
        (True, 16_000)
    ] * 2
    assert data["image"] == [image]


def test_kinds_that_are_not_there_are_not_named() -> None:
    assert multi_modal_data(Media()) == {}
    assert multi_modal_data(Media(audios=(AUDIO,))).keys() == {"audio"}
    assert multi_modal_data(Media(images=(synthetic_image(),))).keys() == {"image"}


async def test_no_rows_come_later() -> None:
    assert [rows async for rows in ThinkerSession(OmniRequest("r", "Hello")).later_rows()] == []
