"""`serve run deployments:app` with the tests' configuration: one for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.configs import TINY_CONFIG
from tests.served.app import ServedApp, serve_run
from tests.served.nodes import default_config, over_nodes


@contextmanager
def _apart() -> Iterator[ServedApp]:
    """Each stage on a node of its own."""
    with TemporaryDirectory() as folder, over_nodes(default_config(), Path(folder) / "apart.yaml") as app:
        yield app


@pytest.fixture(scope="package")
def served(request: pytest.FixtureRequest) -> Iterator[ServedApp]:
    with _apart() if request.config.getoption("--apart") else serve_run(f"config={TINY_CONFIG}") as app:
        yield app
