"""Starts each stage's engine once, so that what engines compile is in its folder before a replica looks for it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from omni_cluster.config.plan import in_data_order
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, make_stage
from omni_cluster.engine.caches import use_cache_dir
from omni_cluster.engine.cards import environment, stage_environment
from omni_cluster.engine.fitting import fit_replica, measure_replica
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import StageDied

_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Started:
    """A stage whose engine was started and ended, and the seconds until it was up, imports included."""

    model_stage: str
    seconds: float


def warm(config: PipelineConfig) -> Iterator[Started]:
    """Starts the stages one after another as a replica of each would, and ends them. One card is enough for all.

    Raises ConfigError, for a folder that cannot be written or memory that a card does not have, and StageDied.
    """
    for stage in in_data_order(config.stages):
        yield Started(stage.model_stage, warm_stage(stage, config))


def warm_stage(stage: StageConfig, config: PipelineConfig) -> float:
    """Starts one stage's engine in a process of its own, as Ray does, and returns the seconds until it was up."""
    began_s = time.monotonic()
    with environment(stage_environment(stage)), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_start_and_end, stage.stage_id, config).result() - began_s
        except BrokenProcessPool:
            raise StageDied(
                f"the process of stage {stage.model_stage} died while its engine was started; see what it printed."
            ) from None


def _start_and_end(stage_id: int, config: PipelineConfig) -> float:
    """Returns when the engine was up, by the clock that all processes of a host share."""
    os.dup2(_STDERR, _STDOUT)  # the command's own lines are alone on standard output
    sys.stdout = sys.stderr
    use_cache_dir(config.cache_dir)
    stage = next(s for s in config.stages if s.stage_id == stage_id)
    bound = fit_replica(bind(config), stage, measure_replica(stage))
    stage = next(s for s in bound.config.stages if s.stage_id == stage_id)
    return asyncio.run(_up_s(make_stage(stage, bound)))


async def _up_s(engine: Stage) -> float:
    try:
        await engine.start()
        return time.monotonic()
    finally:
        await engine.shutdown()


def size_of(folder: Path) -> tuple[int, int]:
    """Files under a folder, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)
