"""Engines of the default family follow the load of a running application."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.http_app import STREAM_TOLERANCE
from tests.served.app import ServedApp, serve_run_over_nodes
from tests.served.autoscaling_promises import MOST, AutoscalingPromises
from tests.served.nodes import default_config
from tests.served.recovering import Recovering

pytestmark = pytest.mark.full

LENGTHS = {"thinker": 8, "talker": 16}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """A talker takes one request at a time and a few tokens of its prompt in a step, and computes prompts whole: it is
    what the others wait for. The node has room for one.
    """
    config = default_config()
    delays = {"upscale_delay_s": 3, "downscale_delay_s": 8}
    bounds = {"min_replicas": 0, "initial_replicas": 1}
    of = {
        "talker": {"max_replicas": MOST, "signals": {"max_backlog_tokens": 1.5 * LENGTHS["talker"]}},
        "code2wav": {"max_replicas": 1, "signals": {"max_slack_use": 1}},
    }
    config["stages"][1]["advanced"]["num_cpus"] = 0.4
    slow = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    config["stages"][1]["engine_args"] |= slow
    for stage in config["stages"][1:]:
        del stage["num_replicas"]
        stage["autoscaling"] = {**bounds, **delays, **of[stage["model_stage"]]}
    path = tmp_path_factory.mktemp("config") / "scaled.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run_over_nodes(f"config={path}", roles=("head",)) as app:
        yield app


@pytest.fixture(scope="module")
def recovering(scaled: ServedApp) -> Recovering:
    return Recovering(scaled, LENGTHS, LENGTHS, voice="Ethan", tolerance=STREAM_TOLERANCE)


class TestAutoscaling(AutoscalingPromises):
    """Two talkers more take to be there what their engines take to start."""
