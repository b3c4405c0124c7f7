"""Pairs of toys: two replicas of each stage without vLLM, which are there in seconds, behind one ingress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.served.app import ROOT, ServedApp, serve_run
from tests.served.recovering import Recovering

TOKEN_S = {"text": 0.005, "codes": 0.004, "sound": 0.01}
"""Of a stage: an answer takes seconds."""


@pytest.fixture(scope="package")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """One replica of the first stage stands by."""
    config = yaml.safe_load((ROOT / "tests" / "families" / "toy" / "toy.yaml").read_text())
    for stage in config["stages"]:
        stage |= {"num_replicas": 2, "options": {"token_s": TOKEN_S[stage["model_stage"]]}}
    config["stages"][0] |= {"num_replicas": 1, "standby_replicas": 1}
    path = tmp_path_factory.mktemp("config") / "toys.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app


@pytest.fixture(scope="package")
def recovering(toys: ServedApp) -> Recovering:
    """Its sound is the same to the sample, however it comes."""
    return Recovering(toys, {"text": 400, "codes": 1000}, {"text": 8, "codes": 40}, voice="high", tolerance=0)
