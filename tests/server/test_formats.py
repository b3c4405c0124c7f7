"""Every format of sound, whole and streamed; `tests/cluster` has one of them on a cluster."""

from __future__ import annotations

import pytest

from tests.cluster.test_app import assert_comes_in
from tests.server.local import LocalApp


@pytest.mark.parametrize("audio_format", ["flac", "opus", "mp3"])
@pytest.mark.parametrize("stream", [False, True])
def test_sound_comes_in_the_format_asked_for(local: LocalApp, audio_format: str, stream: bool) -> None:
    assert_comes_in(audio_format, local, stream=stream)
