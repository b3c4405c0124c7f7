"""Videos and logprobs through the HTTP API."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.models.chat_files import FileTokenizer
from tests.http_app import chat, events, sounds
from tests.openai_api.films import video_file
from tests.reference import Reference
from tests.server.expected import QUESTION, TOKENS, assert_answered_as_by_the_reference, data_url
from tests.server.local import LocalApp


def as_file(*, sound: str | None = None) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(video_file(frames=60, sound=sound), "video/mp4")}}


@pytest.mark.parametrize("kind", ["video", "video+slow"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_video_of_pictures_is_answered_as_by_the_reference(
    local: LocalApp, reference: Reference, kind: str, stream: bool
) -> None:
    assert_answered_as_by_the_reference(local, reference, kind, stream=stream)


def test_the_sound_of_a_video_is_part_of_the_prompt_when_asked_for(local: LocalApp) -> None:
    seen = chat(local, [as_file(sound="aac"), QUESTION], max_tokens=4).json()["usage"]["prompt_tokens"]
    heard = chat(local, [as_file(sound="aac"), QUESTION], max_tokens=4, use_audio_in_video=True).json()
    # Two marks and a token for each 40 ms of two seconds, and of what the codec puts before and after them.
    assert 2 + 50 <= heard["usage"]["prompt_tokens"] - seen <= 2 + 53
    silent = chat(local, [as_file(), QUESTION], max_tokens=4, use_audio_in_video=True)
    assert (silent.status_code, silent.json()["error"]["code"]) == (400, "no_sound_track")


def test_a_video_with_its_sound_is_answered_in_sound(local: LocalApp) -> None:
    answer = chat(
        local, [as_file(sound="aac"), QUESTION], max_tokens=8, stream=True, seed=1, modalities=["text", "audio"],
        audio={"format": "pcm16"}, mm_processor_kwargs={"use_audio_in_video": True},
    )  # fmt: skip
    assert len(b"".join(base64.b64decode(piece) for piece in sounds(events(answer)))) > 0


@pytest.mark.parametrize("most", [0, 3])
def test_logprobs_of_a_stream_are_those_of_the_whole_answer_and_spell_its_text(local: LocalApp, most: int) -> None:
    asking = {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": most}
    (choice,) = chat(local, "Tell me.", **asking).json()["choices"]
    whole = choice["logprobs"]["content"]
    # A token that is a part of a character has no text of its own; these weights make such parts that never get whole.
    spelled = "".join(each["token"] for each in whole)
    assert spelled.replace("\ufffd", "") == choice["message"]["content"].replace("\ufffd", "")
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == most for each in whole)
    assert not most or all(each["top_logprobs"][0]["token"] == each["token"] for each in whole)  # it is greedy
    streamed = [
        each
        for event in events(chat(local, "Tell me.", stream=True, **asking))
        for each in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [each["token"] for each in streamed] == [each["token"] for each in whole]
    assert [each["logprob"] for each in streamed] == pytest.approx([each["logprob"] for each in whole], abs=1e-4)


def test_bytes_of_tokens_joined_are_the_text_also_where_a_character_has_several_tokens(
    local: LocalApp, tiny: Path
) -> None:
    parts = 0
    marks = {mark.content for mark in FileTokenizer(tiny).added_tokens_decoder.values() if mark.special}
    for seed in range(5):
        asking = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "temperature": 1.5, "seed": seed}
        (choice,) = chat(local, "Tell me.", **asking).json()["choices"]
        tokens = choice["logprobs"]["content"]
        said = b"".join(bytes(token["bytes"]) for token in tokens if token["token"] not in marks)
        # These weights make parts of characters that never get whole.
        assert said.decode(errors="ignore") == choice["message"]["content"].replace("\ufffd", "")
        parts += sum(token["token"] == "" for token in tokens)
    assert parts > 0
