"""How much sound an item has, and holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_cluster.openai_api.realtime.session import Pcm, ServerVad
from omni_cluster.server.realtime import input_buffer
from omni_cluster.server.realtime.input_buffer import InputBuffer, SpeechStopped
from omni_cluster.server.realtime.voice_activity import WINDOW
from tests.server.realtime.spoken import silence
from tests.server.speaker import RATE_HZ

MOST = 40 * WINDOW


class LoudIsSpeech:
    """A model of voice activity."""

    def step(self, window: np.ndarray, state: np.ndarray) -> tuple[float, Any]:
        return (0.95 if np.abs(window).max() > 0.01 else 0.01), state


@pytest.mark.parametrize("padding_ms", [31, 300])
def test_a_turn_without_a_pause_is_as_long_as_an_item_may_be(monkeypatch: pytest.MonkeyPatch, padding_ms: int) -> None:
    monkeypatch.setattr(input_buffer, "speech_model", LoudIsSpeech)
    buffer = InputBuffer(Pcm(), ServerVad(type="server_vad", prefix_padding_ms=padding_ms), MOST)
    tone = (np.sin(np.arange(RATE_HZ * 4) / 10) * 8_000).astype(np.int16)
    found = buffer.push(np.concatenate([silence(1.0), tone]).tobytes())
    first, *_ = [len(turn.samples) for turn in found if isinstance(turn, SpeechStopped)]
    assert MOST - WINDOW < first <= MOST


def test_a_turn_holds_no_more_than_its_own_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_buffer, "speech_model", LoudIsSpeech)
    buffer = InputBuffer(Pcm(), ServerVad(type="server_vad"), MOST)
    tone = (np.sin(np.arange(RATE_HZ // 2) / 10) * 8_000).astype(np.int16)
    found = buffer.push(np.concatenate([tone, silence(0.8)] * 5).tobytes())
    turns = [turn.samples for turn in found if isinstance(turn, SpeechStopped)]
    assert len(turns) == 5 and all(samples.base is None for samples in turns)


def test_sound_that_is_pushed_to_the_bound_is_no_longer_than_an_item_may_be() -> None:
    buffer = InputBuffer(Pcm(), None, MOST)
    samples = MOST * RATE_HZ // 16_000
    buffer.push(bytes(2 * samples))
    buffer.push(bytes(2 * 15))  # the room of what the resampler holds back
    assert len(buffer.commit()[1]) == MOST
