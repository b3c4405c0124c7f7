"""vLLM's worker on a CPU, which binds its memory to a node only where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.worker import cpu_worker

from omni_cluster.vllm_engine.install import replaced

__all__ = ["CPUWorker"]


class CPUWorker(cpu_worker.CPUWorker):
    """vLLM's own on a machine of several nodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _bound_to_one_of_several():
            super().__init__(*args, **kwargs)


@contextmanager
def _bound_to_one_of_several() -> Iterator[None]:
    """On a machine of one node the call changes nothing, and torch prints a warning of it that no logger can drop."""
    if len(get_visible_memory_node()) > 1:
        yield
        return
    with replaced(torch.ops._C, "init_cpu_memory_env", lambda _nodes: None):
        yield
