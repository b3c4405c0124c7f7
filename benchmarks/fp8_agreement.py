"""How many greedy tokens a thinker says again once its decoder's weights are rounded as `quantization: fp8` does it.

    python -m benchmarks.fp8_agreement [FOLDER] [--prompts 256] [--tokens 16]

FOLDER: a checkpoint; the tiny one if none is named. transformers' model in float32, so that the rounding of weights is
all that differs, as in steps of one token a request; vLLM's layers, which compute prompts, round activations too.
Tokens are compared as long as the text before them is the same.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.kernels.float8 import VALUES
from omni_cluster.kernels.float8_kernels import LARGEST
from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint

WORDS = "below ships letters where people and bread met seven roads mill gardens lamps talk turn old winter rain of"
WORDS_A_PROMPT = 30
LIKELIEST = 5

Said = list[tuple[int, tuple[int, ...]]]
"""Each token of a reply, and the likeliest at its place."""


def round_weights(thinker: Any) -> int:
    """Rounds the decoder's products in place, with one scale for each that vLLM keeps as one; returns how many."""
    products = [weights for layer in thinker.model.layers for weights in _products(layer)]
    for weights in products:
        scale = max(float(each.abs().max()) for each in weights) / LARGEST
        for each in weights:
            each.copy_((each / scale).to(VALUES).to(each.dtype) * scale)
    return len(products)


def _products(layer: Any) -> Iterator[Sequence[torch.Tensor]]:
    attention, mlp = layer.self_attn, layer.mlp
    yield [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    yield [attention.o_proj.weight]
    yield [mlp.gate_proj.weight, mlp.up_proj.weight]
    yield [mlp.down_proj.weight]


def said(thinker: Any, prompt: torch.Tensor, tokens: int) -> Said:
    made = thinker.generate(
        input_ids=prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    ids = made.sequences[0, prompt.shape[1] :].tolist()
    likeliest = [tuple(logits[0].topk(LIKELIEST).indices.tolist()) for logits in made.logits]
    return list(zip(ids, likeliest, strict=True))


def compared(wanted: Said, found: Said) -> Iterator[tuple[bool, bool]]:
    """Of each token behind the same text: whether it is the same, and whether it is among the likeliest."""
    for (token, _), (other, likeliest) in zip(wanted, found, strict=True):
        yield token == other, token in likeliest
        if token != other:
            return


def prompts(processor: Qwen2_5OmniProcessor, count: int) -> Iterator[torch.Tensor]:
    draw = random.Random(0)
    for _ in range(count):
        message = " ".join(draw.choices(WORDS.split(), k=WORDS_A_PROMPT))
        text = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "text", "text": message}]}], add_generation_prompt=True
        )
        yield processor.tokenizer(text, return_tensors="pt").input_ids


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    folder = options.folder or embedded_checkpoint("tiny")
    thinker = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    asked = list(prompts(Qwen2_5OmniProcessor.from_pretrained(folder), options.prompts))
    wanted = [said(thinker, prompt, options.tokens) for prompt in asked]
    count = round_weights(thinker)
    found = [said(thinker, prompt, options.tokens) for prompt in asked]
    pairs = [pair for one, other in zip(wanted, found, strict=True) for pair in compared(one, other)]
    same, likely = (sum(column) for column in zip(*pairs, strict=True))
    print(f"{count} products rounded; {len(pairs)} tokens behind the same text of {len(asked)} replies")
    same_percent, likely_percent = 100 * same / len(pairs), 100 * likely / len(pairs)
    print(f"the same: {same_percent:.1f} %; among the {LIKELIEST} likeliest: {likely_percent:.1f} %")


if __name__ == "__main__":
    main()
