"""`toy_nodes` once all others are done with it: a new configuration lets its stages grow and sleep."""

from __future__ import annotations

import pytest

from tests.served.app import ServedApp
from tests.served.autoscaling_promises import MOST
from tests.served.deployed import deploy
from tests.served.nodes import placed
from tests.served.recovering import Recovering
from tests.served.replaced import all_are_replaced, process_ids
from tests.served.toy_config import toy_config

LENGTHS = {"text": 40, "codes": 200}


@pytest.fixture(scope="package")
async def scaled(toy_nodes: ServedApp, tmp_path_factory: pytest.TempPathFactory) -> ServedApp:
    """The node of the codes has room for two of their replicas."""
    config, before = placed(toy_config()), await process_ids(toy_nodes)
    follows = {"min_replicas": 0, "initial_replicas": 1, "upscale_delay_s": 1, "downscale_delay_s": 5}
    codes, sound = config["stages"][1:]
    codes["advanced"] = {"num_cpus": 0.4}
    codes["autoscaling"] = follows | {"max_replicas": MOST, "signals": {"max_backlog_tokens": 1.5 * LENGTHS["codes"]}}
    sound["autoscaling"] = follows | {"max_replicas": 1, "signals": {"max_requests": 100}}
    deploy(toy_nodes, config, tmp_path_factory.mktemp("serve") / "scaled.yaml")
    await all_are_replaced(toy_nodes, before)
    return toy_nodes


@pytest.fixture(scope="package")
def recovering(scaled: ServedApp) -> Recovering:
    return Recovering(scaled, LENGTHS, LENGTHS, voice="high", tolerance=0)
