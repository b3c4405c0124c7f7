"""What a process imports before it does anything: libraries that it has no use for cost seconds of each start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.served.app import ROOT

HEAVY = ("torch", "vllm", "transformers", "scipy", "torchvision", "torchaudio", "matplotlib")

DRIVER = "from deployments import app; app({})"
DEMO = "import omni_cluster.demo, omni_cluster.cluster.local; omni_cluster.cluster.local.LocalCluster()"
INGRESS = """
from types import SimpleNamespace
import omni_cluster.cluster.ingress
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.registry import known_families
from omni_cluster.server.app import HttpServer

bound = bind(load_config(None, known_families=known_families()))
assert bound.family.voices and HttpServer(SimpleNamespace(bound=bound)).app()
"""
REPLICA = "import omni_cluster.cluster.stage_deployment"


@pytest.mark.usefixtures("tiny")
def test_a_process_starts_without_the_libraries_of_engines() -> None:
    """An engine's process imports them once it is asked for its engine; the others never do. Here all are in one."""
    shown = f"import json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    code = "\n".join(f"{each}\n{shown}" for each in (DRIVER, DEMO, INGRESS, REPLICA))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == ["[]"] * 4
