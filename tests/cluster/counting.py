"""A Ray of its own, in which a stage and an ingress count without engines: what should be on its page is known.

Says where the page is, counts until a line tells it to stop, says what it counted, and goes on giving it to Ray until
its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
import ray

from omni_cluster.cluster.metrics import RayMetrics, pushed_in_turn
from omni_cluster.config.access import ApiConfig
from omni_cluster.config.limits import Limits
from omni_cluster.engine.metric_definitions import INGRESS, STAGE
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.server.admission import Admission
from omni_cluster.server.metrics import IngressMetrics, ResponseMeter
from omni_cluster.types.outputs import AudioChunk, StageChunk

EVERY_S = 0.05
SOUND = AudioChunk(0, np.zeros(480, np.float32), 24_000)


async def count(stage: StageMetrics, ingress: IngressMetrics) -> None:
    while True:
        at_stage = stage.begin()
        at_stage.handed_over(0.01)
        at_stage.made(StageChunk(token_ids=(1, 2), audio=SOUND))
        at_stage.end("finished")
        at_ingress = ResponseMeter(ingress, "/v1/chat/completions")
        at_ingress.observe_sound(SOUND)
        at_ingress.start(200)
        at_ingress.send(b"abc")
        at_ingress.end(200)
        stage.hold({"running": 1, "waiting": 0, "held": 1}, 1)
        await asyncio.sleep(EVERY_S)


def pages() -> list[str]:
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]


def counted(stage: StageMetrics) -> dict[str, float]:
    return {
        sample.name: sample.value
        for metric in stage.registry.collect()
        for sample in metric.samples
        if not sample.labels
    }


async def main() -> None:
    stage, ingress = StageMetrics(), IngressMetrics()
    Admission(Limits(), 1, ApiConfig(), time.monotonic, ingress)
    pushing = [
        asyncio.create_task(pushed_in_turn(metrics))
        for metrics in (RayMetrics(stage.registry, STAGE, {"stage": "a"}), RayMetrics(ingress.registry, INGRESS, {}))
    ]
    counting = asyncio.create_task(count(stage, ingress))
    print(json.dumps(pages()), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    counting.cancel()
    print(json.dumps(counted(stage)), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for each in pushing:
        each.cancel()


if __name__ == "__main__":
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    asyncio.run(main())
    ray.shutdown()
