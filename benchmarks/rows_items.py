"""How long an item of rows takes from one replica of Ray Serve to another, by its size and how many come at once.

    python -m benchmarks.rows_items [--mib 0.75 4.7 14.7] [--at-once 1 16]

Two deployments on a Ray of their own, and nothing else: the producer yields items as a stage's `rows` call does, the
consumer takes them as `RowsReader` does, copying each out of the store. Times are from when the first was due to
when the last was copied, and of each item from when the producer was asked for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator

import numpy as np
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.row_objects import RowsItem, _copied_out
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.engine.cards import CPU_ENVIRONMENT

ROUNDS = 7
PAUSE_S = 0.2
"""Between two rounds: each begins with nothing under way."""
OPTIONS = {"num_cpus": 0.5, "runtime_env": {"env_vars": CPU_ENVIRONMENT}}


@serve.deployment(ray_actor_options=OPTIONS)
class Producer:
    async def rows(self, num_bytes: int, at_once: int) -> AsyncGenerator[RowsItem, None]:
        """Rounds of items, each with the time at which it was asked for ahead of its rows."""
        rows = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
        for _ in range(ROUNDS):
            await asyncio.sleep(PAUSE_S)
            due_s = time.time()
            for number in range(at_once):
                asked_s = np.frombuffer(np.array([due_s, time.time()]).tobytes(), np.uint8)
                yield RowsItem(number, [np.concatenate([asked_s, rows])])


@serve.deployment(ray_actor_options=OPTIONS)
class Consumer:
    def __init__(self, producer: DeploymentHandle) -> None:
        self._source = RemoteStage(producer)

    async def times_s(self, num_bytes: int, at_once: int) -> tuple[list[float], list[float]]:
        """Of each round until its last item was here, and of each item."""
        rounds, each = [], []
        items = self._source.stream("rows", num_bytes, at_once, by_reference=True)
        async with contextlib.aclosing(items):
            async for item in items:
                (packed,) = await _copied_out(item)
                due_s, asked_s = np.frombuffer(packed[:16].tobytes(), np.float64)
                each.append(time.time() - asked_s)
                if item.first == at_once - 1:
                    rounds.append(time.time() - due_s)
        return rounds, each


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows_items", description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.75, 4.7, 14.7])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    ray.init("local", log_to_driver=False, logging_level="ERROR")
    try:
        consumer = serve.run(Consumer.bind(Producer.bind()), name="rows", route_prefix=None)
        print(
            "| MiB an item | at once | ms of an item: median, most | ms of a round: median, most |\n|---|---|---|---|"
        )
        for mib in asked.mib:
            for at_once in asked.at_once:
                rounds, each = consumer.times_s.remote(int(mib * (1 << 20)), at_once).result()
                print(f"| {mib:g} | {at_once} | {_ms(each)} | {_ms(rounds)} |", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def _ms(times_s: list[float]) -> str:
    return f"{1000 * statistics.median(times_s):.1f}, {1000 * max(times_s):.1f}"


if __name__ == "__main__":
    main()
