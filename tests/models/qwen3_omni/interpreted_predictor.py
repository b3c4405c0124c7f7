"""`python -m tests.models.qwen3_omni.interpreted_predictor`: the predictor's kernels, as Triton interprets them.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints for one and for several
requests, greedy and drawn, whether codes are those of the predictor, all in float32: Triton's interpreter has no
products of bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

from omni_cluster.kernels import decoder_kernels
from omni_cluster.kernels.decoder_tiles import Tiles
from omni_cluster.models.qwen3_omni import fused_predictor
from omni_cluster.models.qwen3_omni.fused_predictor import FusedPredictor
from omni_cluster.models.qwen3_omni.predictor import CodePredictor

CONFIG = SimpleNamespace(
    num_code_groups=6, vocab_size=256, hidden_size=48, num_hidden_layers=2, rms_norm_eps=1e-6, head_dim=32,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=80, rope_parameters={"rope_theta": 1e6},
)  # fmt: skip
FIRST_NOISE, WIDTH = 1000, CONFIG.hidden_size
TILES = {1: Tiles(16, 64, 1, 4, 1), 16: Tiles(16, 32, 1, 4, 2)}
"""Small ones, and of float32, which no card has measured."""


def predictor() -> CodePredictor:
    made = CodePredictor(CONFIG, FIRST_NOISE)
    for name, weight in made.named_parameters():
        is_norm = weight.dim() == 1 or "norm" in name
        std = 0.1 if is_norm else 1.0 if name == "tables" else 2 * weight.shape[-1] ** -0.5
        weight.data.normal_(float(is_norm), std)
    return made


@torch.inference_mode()
def agreements() -> Iterator[bool]:
    torch.manual_seed(0)
    plain = predictor()
    fused = FusedPredictor(plain)
    for requests in (1, 3):
        states, keys = torch.randn(2, requests, WIDTH), torch.randint(-(2**62), 2**62, (requests,))
        for is_greedy in (True, False):
            given = *states, torch.full((requests,), is_greedy), keys
            yield torch.equal(fused(*given), plain(*given))


if __name__ == "__main__":
    with (
        mock.patch.object(decoder_kernels, "tiles_of_nearest", lambda *_: TILES),
        mock.patch.object(fused_predictor, "GATE_UP_TILES", TILES),
        mock.patch.object(FusedPredictor, "_overlaps", staticmethod(lambda _: False)),
    ):
        print(*agreements())
