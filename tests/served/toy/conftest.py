"""A toy with one replica of each stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served.app import ServedApp
from tests.served.recovering import Recovering
from tests.served.toy_config import LONG, SHORT, served_toy, toy_config


@pytest.fixture(scope="package")
def toy() -> Iterator[ServedApp]:
    with served_toy(toy_config()) as app:
        yield app


@pytest.fixture(scope="package")
def recovering(toy: ServedApp) -> Recovering:
    return Recovering(toy, LONG, SHORT, voice="high", tolerance=0)
