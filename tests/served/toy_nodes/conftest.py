"""A toy with each stage on a node of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.served.app import ServedApp
from tests.served.nodes import over_nodes
from tests.served.recovering import Recovering
from tests.served.toy_config import LONG, SHORT, toy_config


@pytest.fixture(scope="package")
def toy_nodes() -> Iterator[ServedApp]:
    with TemporaryDirectory() as folder, over_nodes(toy_config(), Path(folder) / "nodes.yaml") as app:
        yield app


@pytest.fixture(scope="package")
def recovering(toy_nodes: ServedApp) -> Recovering:
    return Recovering(toy_nodes, LONG, SHORT, voice="high", tolerance=0)
