"""Where the parts of a model are that is on several hosts: in actors of Ray, one in each bundle of a placement group.

vLLM has such an executor for cards. On the CPU it finds no device to count bundles by, and asks Ray for none.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.executor.ray_utils import ray

from omni_cluster.vllm_engine.install import replaced

CPU = "CPU"


class CpuWorkerProc(RayWorkerProc):
    """A part without a card."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class CpuHostsExecutor(RayExecutorV2):
    """vLLM's, over bundles of CPUs."""

    def _init_executor(self) -> None:
        current_platform.ray_device_key = CPU
        with replaced(ray_executor_v2, "RayWorkerProc", CpuWorkerProc):
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}  # it is in its bundle, which nothing else uses


def hosts_executor() -> str | type[Executor]:
    """The values for vLLM."""
    return CpuHostsExecutor if current_platform.is_cpu() else "ray"
