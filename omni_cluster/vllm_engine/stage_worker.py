"""vLLM's executor around the worker of a stage that has no tokens, and so no engine core."""

from __future__ import annotations

from typing import Any

import zmq
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor import Executor

from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES

LONGEST_LOOK_MS = 1
"""vLLM's notice of an answer is lost where two come within about a millisecond; the answer is there all the same."""


class StageWorker:
    """The worker of one stage, in this process or in one of its own; its model runs when it is called."""

    def __init__(self, args: OmniEngineArgs) -> None:
        vllm_config = args.create_engine_config()
        with set_current_vllm_config(vllm_config), ENGINE_PROCESSES.installed():
            self._executor: Executor = Executor.get_class(vllm_config)(vllm_config)
        for queue in getattr(self._executor, "response_mqs", ()):
            sleep_until_notified(queue)

    def call(self, method: str, *args: Any) -> list[Any]:
        """What the worker's `method` returns, of each rank."""
        return self._executor.collective_rpc(method, args=args)

    @property
    def is_gone(self) -> bool:
        """Whether the worker's process has ended; a worker in this process has none."""
        return getattr(self._executor, "is_failed", False)

    def shutdown(self) -> None:
        self._executor.shutdown()


def sleep_until_notified(queue: MessageQueue) -> None:
    """Has a reader sleep until its answer is there.

    vLLM's turns round for a second after each answer, as a reader that is in a hurry may: that fills a core of a stage
    that is always at work, and its steps are ahead of the device anyway.
    """
    waiting = queue._spin_condition
    waiting.busy_loop_s = 0
    waiting.poller = ShortPoller(waiting.poller)


class ShortPoller:
    """Looks whether a notice came, for `LONGEST_LOOK_MS` at most."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        return self._poller.poll(min(timeout, LONGEST_LOOK_MS))
