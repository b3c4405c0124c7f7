"""Pairs of toys: two replicas of each stage behind one ingress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served.app import ServedApp
from tests.served.recovering import Recovering
from tests.served.toy_config import LONG, SHORT, served_toy, toy_config


@pytest.fixture(scope="package")
def toys() -> Iterator[ServedApp]:
    """One replica of the first stage stands by."""
    config = toy_config()
    for stage in config["stages"]:
        stage["num_replicas"] = 2
    config["stages"][0] |= {"num_replicas": 1, "standby_replicas": 1}
    with served_toy(config) as app:
        yield app


@pytest.fixture(scope="package")
def recovering(toys: ServedApp) -> Recovering:
    """Its sound is the same to the sample, however it comes."""
    return Recovering(toys, LONG, SHORT, voice="high", tolerance=0)
