"""The example that talks in Python, where its answer is talked over."""

from __future__ import annotations

import sys
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

from omni_cluster.engine.omni_llm import OmniLLM
from tests.example_folders import EXAMPLES, RATE_HZ, SPEECH, kept_answer, ran
from tests.relay import relay
from tests.server.local import LocalApp, local_app

FOLDER = EXAMPLES / "realtime_python"
SOUND = run_path(str(FOLDER / "sound.py"))
CODES = 400
"""Of an answer: 8 s, so that a busy machine hears the user before its end."""
CHUNK = b"\1\2" * 960


@pytest.fixture(scope="module")
def local(omni: OmniLLM) -> Iterator[LocalApp]:
    with local_app(omni, codes=CODES) as app:
        yield app


async def test_an_answer_is_interrupted_and_the_talk_goes_on(local: LocalApp, tmp_path: Path) -> None:
    async with relay(local.url) as it:
        printed = await ran(
            sys.executable, FOLDER / "talk.py", "--interrupt", SPEECH, SPEECH, folder=tmp_path, BASE_URL=it.url
        )
    first, second = it.responses
    (truncated,) = it.of("conversation.item.truncated")
    played_ms = truncated["audio_end_ms"]
    assert truncated["item_id"] == first["output"][0]["id"] and played_ms >= 500
    assert printed == f"{it.text(first)}\n[interrupted after {played_ms} ms]\n{it.text(second)}\n" and it.text(second)
    played, cut = kept_answer(tmp_path), played_ms * RATE_HZ // 1000
    np.testing.assert_array_equal(played[:cut], it.sound(first)[:cut])
    np.testing.assert_array_equal(played[cut:], it.sound(second))
    assert it.of("error") == []


@contextmanager
def _player(folder: Path) -> Iterator[Any]:
    """The example's, which has played a chunk of an answer."""
    with wave.open(str(folder / "answer.wav"), "wb") as file:
        player = SOUND["Player"](file)
        player.turn = "committed"
        player.add("item_1", CHUNK)
        assert player.take() == CHUNK
        yield player


def _more_waits(player: Any) -> None:
    player.add("item_1", CHUNK)
    assert player.end()


def _more_comes(player: Any) -> None:
    """The server is slower than the speakers."""


def _more_comes_while_the_next_file_is_said(player: Any) -> None:
    """The server hears it later."""
    next(SOUND["turn_of"](player, str(SPEECH), False))


def _it_ends_while_the_next_file_is_said(player: Any) -> None:
    next(SOUND["turn_of"](player, str(SPEECH), False))
    assert not player.end()


def _all_was_played(player: Any) -> None:
    assert player.end()


@pytest.mark.parametrize(
    ("state", "played_ms"),
    [
        (_more_waits, 40),
        (_more_comes, 40),
        (_more_comes_while_the_next_file_is_said, 40),
        (_it_ends_while_the_next_file_is_said, None),
        (_all_was_played, None),
    ],
)
def test_an_answer_that_has_more_is_interrupted(
    tmp_path: Path, state: Callable[[Any], None], played_ms: int | None
) -> None:
    with _player(tmp_path) as player:
        state(player)
        assert player.stop() == played_ms
        assert player.take() == bytes(len(CHUNK)), "silence at once"
