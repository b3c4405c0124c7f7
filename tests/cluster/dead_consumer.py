"""A producer whose consumer's node dies while a call for rows is open. Ray knows nothing of that death.

Writes how the call ended, in a line of its own, once the producer has taken another call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from omni_cluster.cluster.row_objects import RowsItem, RowsPublisher
from omni_cluster.engine.memory_budget import MemoryBudget

UNKNOWN_FOR_S = 600
PATIENCE_S = 120
LOOK_S = 0.5


@ray.remote(max_concurrency=10, resources={"producers": 1})
class Producer:
    """A replica's event loop, and the rows of one connection."""

    def __init__(self) -> None:
        self._publisher = RowsPublisher(lambda: True, MemoryBudget())
        self._ended = "open"

    async def rows(self) -> AsyncGenerator[RowsItem, None]:
        try:
            async for item in self._publisher.items(0):
                yield item
            self._ended = "ended"
        except BaseException as error:
            self._ended = type(error).__name__
            raise

    async def publish(self) -> None:
        self._publisher.publish(np.zeros(100, np.uint8))

    async def close(self) -> None:
        self._publisher.close()

    async def how_rows_ended(self) -> str:
        return self._ended


@ray.remote(max_concurrency=10, resources={"consumers": 1})
class Consumer:
    def __init__(self, producer: Any) -> None:
        self._items = producer.rows.options(num_returns="streaming").remote()

    async def read_one(self) -> int:
        """The process's id, once an item has come."""
        await anext(self._items)
        return os.getpid()


def main() -> None:
    cluster = Cluster()
    try:
        print(how_rows_ended_of(cluster), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def how_rows_ended_of(cluster: Cluster) -> str:
    unknown = {"health_check_period_ms": UNKNOWN_FOR_S * 1000}
    cluster.add_node(num_cpus=1, resources={"producers": 1}, include_dashboard=False, _system_config=unknown)
    node = cluster.add_node(num_cpus=1, resources={"consumers": 1})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    producer: Any = Producer.remote()
    consumer: Any = Consumer.remote(producer)
    ray.get(producer.publish.remote())
    process_id = ray.get(consumer.read_one.remote())
    for dies in (node.all_processes["raylet"][0].process.pid, process_id):
        os.kill(dies, signal.SIGKILL)
    ray.get(producer.publish.remote())
    ray.get(producer.close.remote())
    ended = "open"
    while ended == "open":
        time.sleep(LOOK_S)
        ended = ray.get(producer.how_rows_ended.remote(), timeout=PATIENCE_S)
    ray.get(producer.publish.remote(), timeout=PATIENCE_S)
    return ended


if __name__ == "__main__":
    main()
