"""`served` once all others are done with it: it may get another configuration, and be ended."""

from __future__ import annotations

import pytest

from tests.served.app import ServedApp


@pytest.fixture
def ended(served: ServedApp) -> ServedApp:
    return served
