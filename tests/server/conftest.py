"""One HTTP server for all tests that need no cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_cluster.engine.omni_llm import OmniLLM
from tests.server.local import LocalApp, local_app


@pytest.fixture(scope="session")
def local(omni: OmniLLM) -> Iterator[LocalApp]:
    """The embedded default's API in this process, with short answers by default."""
    with local_app(omni) as app:
        yield app
