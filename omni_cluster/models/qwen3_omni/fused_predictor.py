"""The predictor by fused kernels: five a layer for one request, seven for more."""

from __future__ import annotations

import torch

from omni_cluster.kernels.decoder_kernels import (
    MAX_REQUESTS,
    NUM_COUNTERS,
    Weight,
    linear_add,
    norm_gate_up,
    norm_linear,
    padded_rows,
)
from omni_cluster.kernels.decoder_tiles import Tiles
from omni_cluster.models.qwen3_omni.predictor import TOP_K, TOP_P, CodePredictor, PredictorLayer
from omni_cluster.models.qwen3_omni.predictor_kernels import attend, draw

MOST_OVERLAPPED = 16
"""Requests up to which a kernel starts while the one before it ends."""
GATE_UP_TILES = {1: Tiles(4, 1024, 1, 2, 1), **dict.fromkeys((16, 32, 64), Tiles(32, 128, 1, 4, 4))}
"""By padded rows, as in `decoder_tiles`, whose nearest size has six times the features: its tiles would leave most of a
card without work."""


class FusedPredictor:
    """Computes what its `CodePredictor` does, a position at a time: the first two of a frame are two passes."""

    def __init__(self, predictor: CodePredictor) -> None:
        self._predictor = predictor
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=predictor.norm.device)
        self._no_bias = predictor.norm.new_zeros(max(len(predictor.parts[0].qkv), predictor.num_codes))

    @staticmethod
    def fits(predictor: CodePredictor, requests: int) -> bool:
        """Whether the kernels can do it: products are cut for bfloat16 alone, and a head is a power of two."""
        norm, head_dim = predictor.norm, predictor.parts[0].head_norms.shape[1]
        is_power = head_dim & (head_dim - 1) == 0
        return norm.is_cuda and norm.dtype == torch.bfloat16 and is_power and requests <= MAX_REQUESTS

    def __call__(
        self, hidden: torch.Tensor, first: torch.Tensor, greedy: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """See `CodePredictor.forward`."""
        predictor, n = self._predictor, len(hidden)
        noise = predictor.noise(keys)
        codes = keys.new_empty(n, predictor.residual)
        kept = [layer.room(n, predictor.residual + 1) for layer in predictor.parts]
        self._state(hidden, 0, kept)
        entering = first
        for number in range(predictor.residual):
            state = self._state(entering, number + 1, kept)
            logits = self._norm_linear(state, predictor.norm, predictor.heads[number])
            entering = draw(
                logits, greedy, noise[:, number], predictor.tables[number], codes, number, (TOP_K, TOP_P),
                overlap=_overlaps(logits),
            )  # fmt: skip
        return codes

    def _state(self, entering: torch.Tensor, position: int, kept: list[torch.Tensor]) -> torch.Tensor:
        for layer, own in zip(self._predictor.parts, kept, strict=True):
            entering = self._through(layer, entering, position, own)
        return entering

    def _through(self, layer: PredictorLayer, state: torch.Tensor, position: int, kept: torch.Tensor) -> torch.Tensor:
        eps, overlap, tiles = self._predictor.eps, _overlaps(state), GATE_UP_TILES[padded_rows(len(state))]
        qkv = self._norm_linear(state, layer.before_attention, layer.qkv)
        attended = attend(qkv, layer.head_norms, self._predictor.turns, kept, position, eps, overlap=overlap)
        state = linear_add(attended, Weight(layer.out), state, self._counters, overlap=overlap)
        gated = norm_gate_up(state, layer.before_mlp, eps, Weight(layer.gate_up), overlap=overlap, tiles=tiles)
        return linear_add(gated, Weight(layer.down), state, self._counters, overlap=overlap)

    def _norm_linear(self, state: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        bias = self._no_bias[: len(weight)]
        return norm_linear(state, gain, self._predictor.eps, Weight(weight), bias, overlap=_overlaps(state))


def _overlaps(state: torch.Tensor) -> bool:
    if not state.is_cuda or len(state) > MOST_OVERLAPPED:
        return False
    return torch.cuda.get_device_capability(state.device) >= (9, 0)
