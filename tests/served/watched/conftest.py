"""One application that others watch, for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.served.app import KEY, ServedApp, long_checkpoint
from tests.served.at_work import Asking
from tests.served.nodes import default_config, over_nodes

NOBODY = "http://127.0.0.1:9"
"""Where nothing listens: vLLM makes spans of requests that are traced, and they go where Serve's go."""


@pytest.fixture(scope="package")
def watched() -> Iterator[ServedApp]:
    """The default with a second ingress and prompts of 28,000 tokens, each stage on a node of its own, whose disk is
    full for Ray; clients need `KEY`.
    """
    config = default_config()
    config["model"] = str(long_checkpoint())
    config["limits"] |= {"max_prompt_tokens": 28_000}
    for stage in config["stages"][:2]:
        stage["engine_args"] |= {"max_model_len": 32_768, "otlp_traces_endpoint": NOBODY}
    config["ingress_replicas"] = 2
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"{KEY}\n")
        with over_nodes(config | {"api": {"keys_file": str(keys)}}, Path(folder) / "watched.yaml") as app:
            yield app


@pytest.fixture(scope="package")
def asking(watched: ServedApp) -> Asking:
    return Asking(watched, "Ethan", {"talker": {"max_tokens": 1024, "min_tokens": 1024}})
