"""`omni-cluster bench --realtime` against a pipeline that says one word and a second of silence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.realtime import (
    SILENCE_MS,
    RealtimeOptions,
    SpokenTurn,
    TurnClock,
    recording,
    run_realtime,
)
from omni_cluster.cli import main
from omni_cluster.config.limits import Limits
from omni_cluster.openai_api.realtime.session import Pcm, ServerVad
from omni_cluster.openai_api.realtime.sound import HEARD_HZ, Hearing
from omni_cluster.server.realtime.voice_activity import WINDOW, SpeechStream, TurnDetector, speech_model
from tests.server.realtime.room import room

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.full
async def test_conversations_are_measured_beside_sessions_that_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    async with room(tmp_path) as there:
        command = ["bench", "--realtime", "--url", there.url, "--concurrency", "1", "2", "--turns", "2", "--idle", "2"]
        assert await asyncio.to_thread(main, [*command, "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["idle"] == 2 and result["silence_ms"] == SILENCE_MS
    assert [(cell["conversations"], cell["turns"], cell["errors"]) for cell in result["cells"]] == [
        (1, 2, 0),
        (2, 4, 0),
    ]
    for cell in result["cells"]:
        figures = cell["figures"]
        assert figures["first_sound_s"]["p50"] > 0 and figures["noticed_s"]["p50"] > 0
        assert figures["silent_s"]["p50"] == 0  # all of the sound had come before
    assert "first sound" in capsys.readouterr().out


async def test_a_conversation_that_is_refused_is_told_with_the_server_s_sentence(tmp_path: Path) -> None:
    async with room(tmp_path, Limits(max_sessions=1)) as there:
        options = RealtimeOptions(there.url, tmp_path / "out", "bench", concurrency=(1,), turns=1, idle=1)
        with pytest.raises(BenchError, match="1 sessions are open, which is as many as may"):
            await asyncio.to_thread(run_realtime, options)


async def test_a_server_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    options = RealtimeOptions("http://127.0.0.1:9", tmp_path / "out", "bench", concurrency=(1,), turns=1, idle=1)
    with pytest.raises(BenchError, match="name a server by --url"):
        await asyncio.to_thread(run_realtime, options)


@pytest.mark.parametrize("shift_ms", [0, 8, 16, 24])
def test_the_recording_is_one_turn_wherever_windows_begin(shift_ms: int) -> None:
    speech = recording()
    before, after = np.zeros(shift_ms * speech.rate_hz // 1000, np.int16), np.zeros(speech.rate_hz, np.int16)
    sound = Hearing(Pcm()).push(np.concatenate([before, speech.samples, after]))
    detector = TurnDetector(ServerVad(type="server_vad", silence_duration_ms=SILENCE_MS))
    changes = [detector.push(likelihood) for likelihood in SpeechStream(speech_model()).push(sound)]
    ends = [i + 1 for i, change in enumerate(changes) if change == "stopped"]
    spoken_s = (len(before) + len(speech.samples)) / speech.rate_hz
    assert [end * WINDOW / HEARD_HZ - spoken_s for end in ends] == [pytest.approx(SILENCE_MS / 1000, abs=0.1)]


def test_the_sound_of_the_interrupted_answer_is_told_from_that_of_the_next() -> None:
    first, second, clock = SpokenTurn(), SpokenTurn(), TurnClock()
    clock.begin(first, None)
    clock.speak(1.0)
    clock.notice(1.1)
    assert not clock.hear("before", 1.5)  # an answer to less than the turn
    clock.end(2.0)
    assert clock.hear("first", 2.75) and not clock.hear("first", 2.9)
    clock.begin(second, first)
    clock.speak(4.0)
    assert not clock.hear("first", 4.05)
    clock.notice(4.125)
    assert not clock.hear("first", 4.1875)
    clock.notice(4.5)
    clock.end(5.0)
    assert clock.hear("second", 5.5) and not clock.hear("second", 6.0)
    assert first == SpokenTurn(first_sound_s=0.75, noticed_s=0.125, silent_s=0.0625)
    assert second == SpokenTurn(first_sound_s=0.5)


def test_no_idle_session_is_a_number_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--realtime", "--url", "http://127.0.0.1:9", "--concurrency", "1", "--turns", "1"]
    assert main([*command, "--idle", "0", "--out", str(tmp_path / "out")]) == 2
    assert "no turn of 1 conversations succeeded" in capsys.readouterr().err
