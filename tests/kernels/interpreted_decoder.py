"""`python -m tests.kernels.interpreted_decoder`: products of the decoder, as Triton interprets them.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints how far the products of
one and of several rows are from those of plain PyTorch, with weights of float32 and of e4m3: Triton's interpreter has
no products of bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch

from omni_cluster.kernels import decoder_kernels
from omni_cluster.kernels.decoder_kernels import NUM_COUNTERS
from omni_cluster.kernels.decoder_tiles import Tiles
from tests.kernels.kernel_cases import EPS, SCALES, product, rms_norm, silu_and_multiply, stored

WIDTH, FEATURES = 80, 24
ROWS = {1: Tiles(4, 128, 1, 4, 1), 3: Tiles(16, 32, 1, 4, 2)}
SPLIT = {1: Tiles(4, 32, 2, 4, 1), 3: Tiles(16, 32, 2, 4, 2)}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def furthest(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.float() - wanted.float()).norm() / wanted.float().norm())


@torch.inference_mode()
def differences() -> Iterator[float]:
    torch.manual_seed(0)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    for scales in SCALES:
        for n, tiles in ROWS.items():
            x, gain, residual, bias = drawn(n, WIDTH), drawn(WIDTH), drawn(n, FEATURES), drawn(FEATURES)
            weight, both = stored(drawn(FEATURES, WIDTH), scales), stored(drawn(2 * FEATURES, WIDTH), scales)
            normed = rms_norm(x, gain)
            made = decoder_kernels.norm_linear(x, gain, EPS, weight, bias, overlap=False, tiles=tiles)
            yield furthest(made, product(normed, weight, bias))
            made = decoder_kernels.norm_gate_up(x, gain, EPS, both, overlap=False, tiles=tiles)
            yield furthest(made, silu_and_multiply(product(normed, both)))
            made = decoder_kernels.linear_add(x, weight, residual, counters, overlap=False, tiles=SPLIT[n])
            yield furthest(made, product(x, weight) + residual)


if __name__ == "__main__":
    print(*differences())
