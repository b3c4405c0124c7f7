"""A conversation's name: the same for all its turns, another for another one."""

from __future__ import annotations

from typing import Any

from omni_cluster.server.conversation import conversation_of
from tests.openai_api.parts import audio_part, image_part, parse, png_of, wav_of, with_fields

SYSTEM = {"role": "system", "content": "You listen."}
LATER = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": [audio_part(wav_of(range(900)))]}]


def named(*messages: dict[str, Any]) -> bytes:
    return conversation_of(parse(with_fields(messages=list(messages))))


def said(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_later_turns_have_the_name_of_the_first() -> None:
    for first in (said({"type": "text", "text": "Hello"}), said(audio_part(wav_of(range(500))))):
        assert named(SYSTEM, first) == named(SYSTEM, first, *LATER) != b""


def test_conversations_that_begin_otherwise_have_other_names() -> None:
    first = [
        said({"type": "text", "text": "Hello"}),
        said({"type": "text", "text": "Hello!"}),
        said(audio_part(wav_of(range(500)))),
        said(audio_part(wav_of(range(1, 501)))),
        said(audio_part(wav_of(range(501)))),
        said(image_part(png_of("red"))),
        said(image_part(png_of("blue"))),
    ]
    names = [named(*before, each) for before in ([SYSTEM], []) for each in first]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {16}


def test_without_a_message_of_the_user_there_is_none() -> None:
    assert named(SYSTEM) == b""
