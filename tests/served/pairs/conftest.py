"""An application with two replicas of a stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.served.app import ROOT, ServedApp, serve_run


@pytest.fixture(scope="package")
def served_2x2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two thinkers, two talkers, and a code2wav that gets a second replica when it has more than two jobs."""
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml").read_text())
    del config["stages"][2]["num_replicas"]
    config["stages"][2]["autoscaling"] = {
        "max_replicas": 2,
        "upscale_delay_s": 0.5,
        "signals": {"max_requests": 1},
    }
    path = tmp_path_factory.mktemp("config") / "autoscaled.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app
