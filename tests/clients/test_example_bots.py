"""The bots of `examples/`, as their users run them: they are spoken to in real time, interrupted, and spoken to again.

A bot is told the address of a relay, which keeps what it and the server say to each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_cluster.engine.omni_llm import OmniLLM
from tests.browser import is_of
from tests.clients.environments import REQUIREMENTS, python_of
from tests.example_folders import EXAMPLES, RATE_HZ, SPEECH, kept_answer, ran, started
from tests.packages import FETCH_S, NoPackages
from tests.relay import Event, Relay, relay
from tests.server.local import LocalApp, local_app

CODES = 400
"""Of an answer: 8 s, so that there is time to interrupt it."""
TALK_S = 300
WIRE_HZ = 48_000
"""Of LiveKit's console."""
RESAMPLED_S = 0.1
INTERRUPTED_S = 4.0
"""Into the first answer, as the script has it."""
ENVIRONMENTS = {"pipecat_bot": "pipecat", "livekit_agent": "livekit"}
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def local(omni: OmniLLM) -> Iterator[LocalApp]:
    with local_app(omni, codes=CODES) as app:
        yield app


def python(example: str) -> Path:
    try:
        return python_of(ENVIRONMENTS[example])
    except NoPackages as reason:
        pytest.skip(str(reason))


def interrupted(it: Relay) -> tuple[Event, Event, int]:
    """Both answers, and how many milliseconds the first was played."""
    first, second = it.responses
    (truncated,) = it.of("conversation.item.truncated")
    assert truncated["item_id"] == first["output"][0]["id"] and it.of("error") == []
    assert it.text(second)
    return first, second, truncated["audio_end_ms"]


@pytest.mark.parametrize("example", ENVIRONMENTS)
def test_a_bot_asks_for_the_versions_that_are_run(example: str) -> None:
    """Which `requirements/` has with all that they need."""
    asked = (EXAMPLES / example / "requirements.txt").read_text().splitlines()
    pinned = (REQUIREMENTS / f"{ENVIRONMENTS[example]}.txt").read_text()
    assert asked
    for line in asked:
        name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?==([\w.]+)", line).groups()
        assert f"\n{name}=={version}\n" in pinned


@pytest.mark.slow
@pytest.mark.timeout(FETCH_S + TALK_S)
async def test_the_pipecat_bot_talks(local: LocalApp, tmp_path: Path, unused_tcp_port: int) -> None:
    interpreter, folder, port = python("pipecat_bot"), EXAMPLES / "pipecat_bot", str(unused_tcp_port)
    async with (
        relay(local.url) as it,
        started(interpreter, folder / "bot.py", folder=tmp_path, BASE_URL=it.url, PORT=port) as bot,
    ):
        (*_, url) = (await bot.line()).split()
        heard = await ran(interpreter, folder / "speak.py", SPEECH, SPEECH, folder=tmp_path, BOT_URL=url)
        status, said, log = await bot.ended()
    first, second, played_ms = interrupted(it)
    assert heard == f"{it.text(first)}\n[interrupted]\n{it.text(second)}\n"
    assert (status, said) == (0, f"{it.text(first)} [interrupted]\n{it.text(second)}\n"), log
    played = kept_answer(tmp_path)
    assert is_of(played[played != 0], [it.sound(first)[: len(played)], it.sound(second)])
    assert played_ms >= 500


@pytest.mark.slow
@pytest.mark.timeout(FETCH_S + TALK_S)
async def test_the_livekit_agent_talks(local: LocalApp, tmp_path: Path) -> None:
    interpreter, agent = python("livekit_agent"), EXAMPLES / "livekit_agent" / "agent.py"
    async with relay(local.url) as it:
        printed = await ran(
            interpreter, SCRIPTS / "livekit_console.py", agent, SPEECH, folder=tmp_path, BASE_URL=it.url
        )
    saw = json.loads(printed)
    first, second, played_ms = interrupted(it)
    assert (saw["cleared"], saw["finished"]) == (1, 1)
    texts = {role: [item["text"] for item in saw["items"] if item["role"] == role] for role in ("USER", "ASSISTANT")}
    cut, whole = texts["ASSISTANT"]
    assert whole == it.text(second) and cut and it.text(first).startswith(cut)
    assert texts["USER"] == [e["transcript"] for e in it.of("conversation.item.input_audio_transcription.completed")]
    played_s = len(kept_answer(tmp_path, WIRE_HZ)) / WIRE_HZ - len(it.sound(second)) / RATE_HZ
    assert INTERRUPTED_S - RESAMPLED_S < played_s < played_ms / 1000 + RESAMPLED_S, "it counts gaps as played"
