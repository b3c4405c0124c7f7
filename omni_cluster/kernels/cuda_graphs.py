"""Work captured as a CUDA graph, with the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")


class GraphPool:
    """Memory that graphs share because they never run at the same time."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def stream(self, priority: int) -> torch.cuda.Stream:
        """That all of them are captured in: cuBLAS keeps 32 MiB for each stream that it has seen."""
        if priority not in self._streams:
            self._streams[priority] = torch.cuda.Stream(priority=priority)
        return self._streams[priority]


class CapturedWork(Generic[Inputs, Output]):
    """`work` as one CUDA graph: `replay` runs it again on the same tensors, those of `inputs` and of `work` itself.

    `work` runs twice before, as warm-up: kernels are compiled and chosen outside of the capture. `priority`: that of
    its kernels, which a graph has of the stream that it is captured in; below 0 they go before others.
    """

    def __init__(self, inputs: Inputs, work: Callable[[], Output], pool: GraphPool, priority: int = 0) -> None:
        self.inputs = inputs
        self._work = work  # or others would be given the memory of its tensors
        self._graph = torch.cuda.CUDAGraph()
        side = pool.stream(priority)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=side):
            self._output = work()

    def replay(self) -> Output:
        """What `work` gives, in memory that another replay of the pool's graphs uses again."""
        self._graph.replay()
        return self._output


def size_at_least(count: int, sizes: Iterable[int]) -> int | None:
    """The smallest of `sizes` that is at least `count`; None when all are smaller."""
    return min((size for size in sizes if size >= count), default=None)
