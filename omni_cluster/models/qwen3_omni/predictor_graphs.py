"""The predictor's passes as CUDA graphs, one for each of some numbers of requests: launches are most of what they cost.

A frame takes hundreds of kernels of a few microseconds, and thousands where they are not fused; their launches one by
one take the host several times that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least
from omni_cluster.models.qwen3_omni.fused_predictor import FusedPredictor
from omni_cluster.models.qwen3_omni.predictor import CodePredictor, Given


class PredictorGraphs:
    """Codes of as many requests as there are, by the smallest graph that has room; of more, or of any before
    `capture`, by the predictor itself.
    """

    def __init__(self, predictor: CodePredictor) -> None:
        self._predictor = predictor
        self._graphs: dict[int, CapturedWork[Given, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int]) -> None:
        """Captures the passes, once the weights are loaded. All sizes share memory: the largest is first."""
        ordered, pool = sorted(sizes, reverse=True), GraphPool()
        whole, predictor = Given.room(ordered[0], self._predictor.norm), self._predictor
        fused = FusedPredictor(predictor)
        for size in ordered:
            given = whole.first_of(size)
            # Each graph keeps its work: it reads tensors of `fused`, and freed ones would hold what others put there.
            work = partial(fused if FusedPredictor.fits(predictor, size) else predictor, *given)
            self._graphs[size] = CapturedWork(given, work, pool)

    def __call__(self, given: Given) -> torch.Tensor:
        """Codes int64 `[n, Q - 1]`, in memory that the next call uses again."""
        n = len(given.hidden)
        size = size_at_least(n, self._graphs)
        if size is None:
            codes: torch.Tensor = self._predictor(*given)
            return codes
        graph = self._graphs[size]
        for place, each in zip(graph.inputs.first_of(n), given, strict=True):
            place.copy_(each)
        return graph.replay()[:n]
