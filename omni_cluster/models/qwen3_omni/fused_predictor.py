"""The predictor by fused kernels: five a layer for one request, seven for more."""

from __future__ import annotations

import torch

from omni_cluster.kernels.decoder_kernels import (
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
LEAST_HEAD_DIM = 32
GATE_UP_TILES = {1: Tiles(4, 1024, 1, 2, 1), **dict.fromkeys((16, 32, 64), Tiles(32, 128, 1, 4, 4))}
"""By padded rows, as in `decoder_tiles`, whose nearest size has six times the features: its tiles would leave most of a
card without work."""


class FusedPredictor:
    """Computes what its `CodePredictor` does, a position at a time: the first two of a frame are two passes.

    Up to `MAX_REQUESTS`, with weights of bfloat16 on CUDA.
    """

    def __init__(self, predictor: CodePredictor, folds_norm: bool = True) -> None:
        self._predictor, self._folds_norm = predictor, folds_norm
        device, layer = predictor.norm.device, predictor.parts[0]
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        self._no_bias = predictor.norm.new_zeros(max(len(layer.qkv), predictor.num_codes))

    @staticmethod
    def fits(predictor: CodePredictor) -> bool:
        norm, head_dim = predictor.norm, predictor.parts[0].head_norms.shape[1]
        is_power = head_dim & (head_dim - 1) == 0
        return norm.is_cuda and norm.dtype == torch.bfloat16 and head_dim >= LEAST_HEAD_DIM and is_power

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
            logits = self._logits(self._state(entering, number + 1, kept), number)
            entering = draw(
                logits, greedy, noise[:, number], predictor.tables[number], codes, number, (TOP_K, TOP_P),
                overlap=self._overlaps(hidden),
            )  # fmt: skip
        return codes

    def _state(self, entering: torch.Tensor, position: int, kept: list[torch.Tensor]) -> torch.Tensor:
        for layer, own in zip(self._predictor.parts, kept, strict=True):
            entering = self._through(layer, entering, position, own)
        return entering

    def _through(self, layer: PredictorLayer, state: torch.Tensor, position: int, kept: torch.Tensor) -> torch.Tensor:
        eps, overlap, bias = layer.eps, self._overlaps(state), self._no_bias[: len(layer.qkv)]
        qkv = norm_linear(
            state, layer.before_attention, eps, Weight(layer.qkv), bias, overlap=overlap, folds_norm=self._folds_norm
        )
        attended = attend(qkv, layer.head_norms, self._predictor.turns, kept, position, eps, overlap=overlap)
        state = linear_add(attended, Weight(layer.out), state, self._counters, overlap=overlap)
        tiles = GATE_UP_TILES[padded_rows(len(state))]
        gated = norm_gate_up(
            state,
            layer.before_mlp,
            eps,
            Weight(layer.gate_up),
            overlap=overlap,
            tiles=tiles,
            folds_norm=self._folds_norm,
        )
        return linear_add(gated, Weight(layer.down), state, self._counters, overlap=overlap)

    def _logits(self, state: torch.Tensor, number: int) -> torch.Tensor:
        predictor = self._predictor
        bias, eps = self._no_bias[: predictor.num_codes], predictor.parts[0].eps
        head = Weight(predictor.heads[number])
        return norm_linear(
            state, predictor.norm, eps, head, bias, overlap=self._overlaps(state), folds_norm=self._folds_norm
        )

    @staticmethod
    def _overlaps(state: torch.Tensor) -> bool:
        return len(state) <= MOST_OVERLAPPED and torch.cuda.get_device_capability(state.device) >= (9, 0)
