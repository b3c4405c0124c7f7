from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.models.thinker_session import ThinkerSession, multi_modal_data
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import Media, OmniRequest, Prompt
from tests.reference import synthetic_image, synthetic_video

AUDIO = np.zeros(160, np.float32)


def session(request: OmniRequest) -> ThinkerSession:
    return ThinkerSession(request, lambda text, has_marks: [ord(letter) + 1000 * has_marks for letter in text])


async def test_a_reply_that_is_given_ends_the_prompt() -> None:
    made = await session(OmniRequest("r", "ab", reply="c")).prompt()
    assert made.prompt == {"prompt_token_ids": [1097, 1098, 99]}
    assert made.sampling["max_tokens"] == 1 and made.emit_rows and made.rows_complete
    assert made.given_reply is not None and (made.given_reply.token_ids, made.given_reply.text) == ((99,), "c")


async def test_text_prompt_has_no_media() -> None:
    made = await session(OmniRequest("r", "Hello")).prompt()
    assert made.prompt == {"prompt": "Hello"}
    assert made.rows_complete


async def test_a_rendered_prompt_is_text_unless_it_comes_with_ids() -> None:
    media = Media((AUDIO,))
    assert (await session(OmniRequest("r", Prompt("Hello"))).prompt()).prompt == {"prompt": "Hello"}
    made = (await session(OmniRequest("r", Prompt("<|im_end|>", (5, 6)), media)).prompt()).prompt
    assert made["prompt_token_ids"] == [5, 6] and "prompt" not in made and made["multi_modal_data"].keys() == {"audio"}


@pytest.mark.parametrize("wants_audio", [True, False])
async def test_rows_are_made_for_requests_that_want_audio(wants_audio: bool) -> None:
    made = await session(OmniRequest("r", "Hello", wants_audio=wants_audio)).prompt()
    assert made.emit_rows == wants_audio and made.sampling == {}


async def test_media_keep_their_order() -> None:
    first, second, image = AUDIO, AUDIO + 1, synthetic_image()
    made = await session(OmniRequest("r", "Hello", Media((first, second), (image,)))).prompt()
    data = made.prompt["multi_modal_data"]
    assert [(audio is given, rate) for (audio, rate), given in zip(data["audio"], (first, second), strict=True)] == [
        (True, 16_000)
    ] * 2
    assert data["image"] == [image]


def test_kinds_that_are_not_there_are_not_named() -> None:
    assert multi_modal_data(Media()) == {}
    assert multi_modal_data(Media(audios=(AUDIO,))).keys() == {"audio"}
    assert multi_modal_data(Media(images=(synthetic_image(),))).keys() == {"image"}


def test_videos_take_their_rate_and_their_sound_with_them() -> None:
    fast, slow = synthetic_video(2, fps=2.0, audio_s=1.0), synthetic_video(2, fps=0.5, audio_s=4.0)
    (frames, about), (_, later) = multi_modal_data(Media(audios=(AUDIO,), videos=(fast, slow)))["video"]
    assert frames is fast.frames and about["fps"] == 2.0 and about["audio"] is fast.audio
    assert later["fps"] == 0.5 and later["audio"] is slow.audio


async def test_videos_of_which_only_some_have_sound_are_refused() -> None:
    some = Media(videos=(synthetic_video(2, fps=2.0), synthetic_video(2, fps=2.0, audio_s=1.0)))
    with pytest.raises(RequestError, match="some videos come with their audio and some without"):
        await session(OmniRequest("r", "Hello", some)).prompt()


async def test_no_rows_come_later() -> None:
    assert [rows async for rows in session(OmniRequest("r", "Hello")).later_rows()] == []
