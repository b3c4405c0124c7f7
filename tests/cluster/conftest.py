"""One served application a module: three engines and more take half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.served import ROOT, ServedApp, serve_run


@pytest.fixture(scope="module")
def served() -> Iterator[ServedApp]:
    """`serve run deployments:app`, without arguments."""
    with serve_run() as app:
        yield app


@pytest.fixture(scope="module")
def served_2x2() -> Iterator[ServedApp]:
    """Two thinkers, two talkers, one code2wav."""
    with serve_run(f"config={ROOT / 'stage_configs' / 'qwen2_5_omni_2x2_tiny.yaml'}") as app:
        yield app
