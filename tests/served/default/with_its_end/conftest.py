"""`served` once all others are done with it: it may get another configuration, and be ended."""

from __future__ import annotations

import pytest

from tests.http_app import STREAM_TOLERANCE
from tests.served.app import ServedApp
from tests.served.recovering import Recovering

LONG = {"thinker": 16, "talker": 2000}
"""Longer than the grace where eight are asked for at once: 20 s for one on two cores."""
SHORT = {"thinker": 16, "talker": 48}


@pytest.fixture(scope="package")
def recovering(served: ServedApp) -> Recovering:
    return Recovering(served, LONG, SHORT, voice="Ethan", tolerance=STREAM_TOLERANCE)
