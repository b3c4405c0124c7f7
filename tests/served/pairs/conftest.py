"""An application with two replicas of a stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.served.app import KEY, ROOT, ServedApp, serve_run


@pytest.fixture(scope="package")
def served_2x2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two thinkers, two talkers, a code2wav that gets a second replica when it has more than two jobs; few may wait.

    Bodies have to come quickly, and little may be left unread. Clients need `KEY`, and may name media on this machine
    by URL.
    """
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml").read_text())
    del config["stages"][2]["num_replicas"]
    config["stages"][2]["autoscaling"] = {
        "max_replicas": 2,
        "upscale_delay_s": 0.5,
        "signals": {"max_requests": 1},
    }
    config["limits"] |= {"max_ongoing_requests": 12, "max_queued_requests": 24}
    config["limits"] |= {"upload_timeout_s": 3, "max_unread_bytes": 262_144}
    config["fetch"] = {"allow_private": True}
    path = tmp_path_factory.mktemp("config") / "autoscaled.yaml"
    config["api"] = {"keys_file": str(path.with_name("keys.txt")), "cors_origins": ["https://app.example"]}
    path.with_name("keys.txt").write_text(f"# the tests'\n{KEY}\n")
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app
