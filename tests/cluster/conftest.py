"""What tests of calls between replicas share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_search_for_garbage() -> Iterator[None]:
    """What is freed meanwhile had nothing that refers to it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
