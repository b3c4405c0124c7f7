"""The server that the clients ask, what it says to a plain HTTP client, and what each script saw."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_cluster.engine.omni_llm import OmniLLM
from tests.clients.plain import Plain
from tests.clients.runs import Runs
from tests.server.local import LocalApp, local_app
from tests.server.realtime.spoken import sentences
from tests.server.speaker import RATE_HZ

HERE = Path(__file__).parent
QUESTION_HZ = 16_000


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come last: engines that they start run until the session ends, beside all that comes after them."""
    items.sort(key=lambda item: item.path.parent == HERE)


@pytest.fixture(scope="session")
def local(omni: OmniLLM) -> Iterator[LocalApp]:
    """The embedded default's API in this process, with short answers by default."""
    with local_app(omni) as app:
        yield app


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has `question.wav`, half a second of a tone, `picture.png`, and two sentences, `first.wav` and `second.wav`."""
    folder = tmp_path_factory.mktemp("clients")
    times_s = np.arange(QUESTION_HZ // 2) / QUESTION_HZ
    _write(folder / "question.wav", 8000 * np.sin(2 * np.pi * 440 * times_s), QUESTION_HZ)
    for name, samples in zip(("first.wav", "second.wav"), sentences(), strict=True):
        _write(folder / name, samples, RATE_HZ)
    colors = np.arange(56 * 56 * 3, dtype=np.uint32).reshape(56, 56, 3) % 251
    Image.fromarray(colors.astype(np.uint8)).save(folder / "picture.png")
    return folder


def _write(path: Path, samples: np.ndarray, rate_hz: int) -> None:
    """Samples of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture(scope="session")
def plain(local: LocalApp, folder: Path) -> Plain:
    return Plain(local.client, folder)


@pytest.fixture(scope="session")
def runs(local: LocalApp, folder: Path, tiny: Path) -> Runs:
    return Runs(local.url, folder, tiny)
