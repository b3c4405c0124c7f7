"""A toy with each stage on a node of its own, whose disk is full for Ray, and two ingresses with bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.served.app import KEY, ServedApp
from tests.served.at_work import Asking
from tests.served.nodes import over_nodes
from tests.served.recovering import Recovering
from tests.served.toy_config import LONG, SHORT, bounded, toy_config


@pytest.fixture(scope="package")
def toy_nodes() -> Iterator[ServedApp]:
    """Clients need `KEY`, and may name media on this machine by URL."""
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"# the tests'\n{KEY}\n")
        with over_nodes(toy_config() | bounded(keys), Path(folder) / "nodes.yaml") as app:
            yield app


@pytest.fixture(scope="package")
def recovering(toy_nodes: ServedApp) -> Recovering:
    return Recovering(toy_nodes, LONG, SHORT, voice="high", tolerance=0)


@pytest.fixture(scope="package")
def asking(toy_nodes: ServedApp) -> Asking:
    return Asking(toy_nodes, "high", {"text": {"max_tokens": 100}, "codes": {"max_tokens": 250, "min_tokens": 250}})
