"""What tests of calls between replicas share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_cluster.cluster.starting import without_collector


@pytest.fixture
def no_search_for_garbage() -> Iterator[None]:
    """What is freed meanwhile had nothing that refers to it."""
    with without_collector():
        yield
