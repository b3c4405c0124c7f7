"""vLLM's executor around the worker of a stage that has no tokens, and so no engine core."""

from __future__ import annotations

from typing import Any

from vllm.config import set_current_vllm_config
from vllm.v1.executor import Executor

from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES
from omni_cluster.vllm_engine.raised import check_none_raised
from omni_cluster.vllm_engine.sleeping_condition import readers_sleep


class StageWorker:
    """The worker of one stage, in this process or in one of its own; its model runs when it is called."""

    def __init__(self, args: OmniEngineArgs) -> None:
        vllm_config = args.create_engine_config()
        with set_current_vllm_config(vllm_config), ENGINE_PROCESSES.installed(), readers_sleep():
            self._executor: Executor = Executor.get_class(vllm_config)(vllm_config)

    def call(self, method: str, *args: Any) -> list[Any]:
        """What the worker's `method` returns, of each rank. Raises an OmniError of it as it is."""
        given = self._executor.collective_rpc(method, args=args)
        check_none_raised(given)
        return given

    @property
    def is_gone(self) -> bool:
        """Whether the worker's process has ended; a worker in this process has none."""
        return getattr(self._executor, "is_failed", False)

    def shutdown(self) -> None:
        self._executor.shutdown()
