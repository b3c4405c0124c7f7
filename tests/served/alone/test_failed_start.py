"""Replicas that do not come up: Serve ends them as it ends others."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from omni_cluster.cluster import starting
from omni_cluster.cluster.stage_deployment import StageReplica
from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.caches import PARTS
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ConfigError
from tests.configs import TINY_CONFIG

pytestmark = pytest.mark.cluster

CODE2WAV = 2
GONE_S = 10


@pytest.fixture
def without_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    # A replica has a process of its own, and changes its variables; what is not set could not be restored.
    for name in {*os.environ, *PARTS}:
        monkeypatch.setenv(name, os.environ.get(name, "unset"))
    monkeypatch.setattr(starting, "kv_put", lambda _key, _said, namespace: None)  # who waits for it asks Ray's store
    return load_config(TINY_CONFIG, known_families=known_families()).model_copy(
        update={"model": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    )


async def test_a_stage_without_its_checkpoint_says_so_and_ends(without_checkpoint: PipelineConfig) -> None:
    before = set(psutil.Process().children())
    replica = StageReplica.__new__(StageReplica)
    with pytest.raises(ConfigError, match="a folder without config"):
        await replica.__init__(CODE2WAV, without_checkpoint)  # type: ignore[misc]
    await replica.__del__()
    (watchdog,) = set(psutil.Process().children()) - before  # it would end what is left with the replica's process
    replica._watchdog.close()
    assert psutil.wait_procs([watchdog], GONE_S)[1] == []
