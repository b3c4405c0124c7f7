"""Voices by the names that clients have for them."""

from __future__ import annotations

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.voices import chosen_voice

VOICES = ("Chelsie", "Ethan")
ALIASES = {"alloy": "Chelsie", "Onyx": "Ethan", "ethan": "Chelsie"}


@pytest.mark.parametrize(
    ("name", "voice"),
    [
        ("Ethan", "Ethan"),
        ("ETHAN", "Ethan"),  # a voice before an alias
        ("chelsie", "Chelsie"),
        ("alloy", "Chelsie"),
        ("ALLOY", "Chelsie"),
        ("onyx", "Ethan"),
        (None, None),
    ],
)
def test_a_voice_is_found_by_its_name_or_an_alias_whatever_the_case(name: str | None, voice: str | None) -> None:
    assert chosen_voice({"voice": name}, VOICES, ALIASES) == voice


@pytest.mark.parametrize("name", ["Bob", "Ethan ", "alloy2", "\u0130"])
def test_a_name_that_is_neither_is_refused_with_the_voices(name: str) -> None:
    with pytest.raises(BadRequest, match="but the voices are Chelsie, Ethan") as caught:
        chosen_voice({"audio.voice": name}, VOICES, ALIASES)
    assert caught.value.param == "audio.voice"


def test_two_fields_may_name_one_voice_but_not_two() -> None:
    assert chosen_voice({"voice": "Ethan", "speaker": "onyx"}, VOICES, ALIASES) == "Ethan"
    with pytest.raises(BadRequest, match="voice and speaker differ"):
        chosen_voice({"voice": "Ethan", "speaker": "alloy"}, VOICES, ALIASES)
