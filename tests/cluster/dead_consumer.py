"""A producing replica whose consumer's node dies while a call for rows is open. Ray knows nothing of that death.

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
from ray import serve
from ray.cluster_utils import Cluster

from omni_cluster.cluster.row_objects import RowsItem, RowsPublisher
from omni_cluster.engine.memory_budget import MemoryBudget
from tests.served.app import cluster_of, node_options, started_node

UNKNOWN_FOR_S = 600
PATIENCE_S = 120
LOOK_S = 0.5


def on(role: str) -> dict[str, Any]:
    """A node of its own."""
    return {"num_cpus": 0, "label_selector": {"role": role}}


@serve.deployment(ray_actor_options=on("producer"))
class Producer:
    """The rows of one connection."""

    def __init__(self) -> None:
        self._publisher = RowsPublisher(lambda: True, MemoryBudget())
        self._ended = ""

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


@serve.deployment(ray_actor_options=on("consumer"))
class Consumer:
    def __init__(self, producer: Any) -> None:
        self._producer = producer

    async def read_one(self) -> int:
        """The process's id, once an item has come."""
        self._items = self._producer.options(stream=True).rows.remote()
        await anext(self._items)
        return os.getpid()


def main() -> None:
    unknown = {"health_check_period_ms": UNKNOWN_FOR_S * 1000}
    cluster = cluster_of(node_options("producer") | {"_system_config": unknown})
    try:
        print(how_rows_ended_of(cluster), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def how_rows_ended_of(cluster: Cluster) -> str:
    node = started_node(cluster, "consumer", ())
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    serve.start(proxy_location="Disabled")
    consumer = serve.run(Consumer.bind(Producer.bind()), route_prefix=None)  # type: ignore[attr-defined]
    producer = serve.get_deployment_handle("Producer", "default")
    producer.publish.remote().result(timeout_s=PATIENCE_S)
    process_id = consumer.read_one.remote().result(timeout_s=PATIENCE_S)
    for dies in (node.all_processes["raylet"][0].process.pid, process_id):
        os.kill(dies, signal.SIGKILL)
    producer.publish.remote().result(timeout_s=PATIENCE_S)
    producer.close.remote().result(timeout_s=PATIENCE_S)
    while not (ended := producer.how_rows_ended.remote().result(timeout_s=PATIENCE_S)):
        time.sleep(LOOK_S)
    producer.publish.remote().result(timeout_s=PATIENCE_S)
    return str(ended)


if __name__ == "__main__":
    main()
