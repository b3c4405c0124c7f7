"""`python -m tests.models.qwen3_omni.interpreted_predictor`: the predictor's kernels, as Triton interprets them.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints of some batches whether
their codes are those of the predictor, all in float32, for Triton's interpreter has no products of bfloat16; then
whether codes drawn of bfloat16 are, many of which equal each other.
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
from omni_cluster.models.qwen3_omni.predictor import TOP_K, TOP_P, CodePredictor, drawn
from omni_cluster.models.qwen3_omni.predictor_kernels import draw

CONFIG = SimpleNamespace(
    num_code_groups=5, vocab_size=200, hidden_size=48, num_hidden_layers=2, rms_norm_eps=1e-6, head_dim=32,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=80, rope_parameters={"rope_theta": 1e6},
)  # fmt: skip
FIRST_NOISE, WIDTH = 1000, CONFIG.hidden_size
TILES = {1: Tiles(64, 64, 1, 4, 1), 16: Tiles(64, 32, 1, 4, 2)}
"""Of float32, for which none are measured."""
GREEDY = [True], [False], [True, False, False]
"""Of each batch's requests."""


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
    for greedy in GREEDY:
        n = len(greedy)
        given = *torch.randn(2, n, WIDTH), torch.tensor(greedy), torch.randint(-(2**62), 2**62, (n,))
        yield torch.equal(fused(*given), plain(*given))
    yield draws_alike(64)


def draws_alike(requests: int) -> bool:
    logits, greedy = (torch.randn(requests, CONFIG.vocab_size) + 8).bfloat16(), torch.rand(requests) < 0.25
    # So that what is left out of the draw is as likely to win as what is left in.
    noise = logits.double().softmax(-1) * (0.5 + torch.rand_like(logits, dtype=torch.float64))
    table, codes = torch.randn(CONFIG.vocab_size, WIDTH), torch.zeros(requests, 3, dtype=torch.int64)
    entering = draw(logits, greedy, noise, table, codes, 1, (TOP_K, TOP_P), overlap=False)
    wanted = drawn(logits.float(), greedy, noise)
    return torch.equal(codes[:, 1], wanted) and torch.equal(entering, table[wanted]) and not codes[:, ::2].any()


if __name__ == "__main__":
    with (
        mock.patch.object(decoder_kernels, "tiles_of_nearest", lambda *_: TILES),
        mock.patch.object(fused_predictor, "GATE_UP_TILES", TILES),
    ):
        print(*agreements())
