"""How many greedy tokens a stage makes again once its weights are rounded as the low precision of its family does it.

    python -m benchmarks.fp8_agreement [FOLDER] [--stage "qwen3_omni thinker"] [--prompts 256] [--tokens 16]

FOLDER: a checkpoint; the tiny one if none is named. transformers' model in float32, so that the rounding of weights is
all that differs; vLLM's layers round activations too. Qwen2.5-Omni's thinker: the decoder's products (`quantization:
fp8`), which its own kernels read so in steps of one token a request. Qwen3-Omni's thinker and talker: the experts
(`moe: fp8_per_block`); the talker's tokens are the first codes of its frames.
Tokens are compared as long as those before them are the same.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from omni_cluster.kernels.float8 import VALUES
from omni_cluster.kernels.float8_kernels import LARGEST
from omni_cluster.models.registry import family_class

WORDS = "below ships letters where people and bread met seven roads mill gardens lamps talk turn old winter rain of"
WORDS_A_PROMPT = 30
LIKELIEST = 5
BLOCK = 128

Said = list[tuple[int, tuple[int, ...]]]
"""Each token of a reply, and the likeliest at its place."""


def round_products(thinker: Any) -> int:
    """The decoder's products in place, with one scale for each that vLLM keeps as one."""
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


def round_experts(thinker: Any) -> int:
    """Each expert's two products in place, by vLLM's own function: a scale for each block of `BLOCK` x `BLOCK`."""
    experts = [layer.mlp.experts for layer in thinker.model.layers]
    products = [each for layer in experts for weights in (layer.gate_up_proj, layer.down_proj) for each in weights]
    for weight in products:
        values, scales = per_block_cast_to_fp8(weight, [BLOCK, BLOCK])
        wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        weight.copy_(values.to(weight.dtype) * wide)
    return len(products)


def said(thinker: Any, prompt: torch.Tensor, tokens: int) -> Said:
    made = thinker.generate(
        input_ids=prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    ids = made.sequences[0, prompt.shape[1] :].tolist()
    likeliest = [tuple(logits[0].topk(LIKELIEST).indices.tolist()) for logits in made.logits]
    return list(zip(ids, likeliest, strict=True))


def spoken(model: Any, prompt: torch.Tensor, tokens: int) -> Said:
    """The first codes of a reply of as many tokens as it has frames, and the likeliest before penalties."""
    talker, logits, heard = model.talker, [], []

    def whole(codes: torch.Tensor, **_: Any) -> torch.Tensor:
        heard.append(codes[0, 0].tolist())
        return codes.new_zeros(1, 1, 1).float()

    hook = talker.codec_head.register_forward_hook(lambda _, __, made: logits.append(made[0, -1]))
    with patch.object(model.code2wav, "chunked_decode", whole):
        model.generate(
            input_ids=prompt, thinker_max_new_tokens=tokens, thinker_min_new_tokens=tokens, thinker_do_sample=False,
            talker_max_new_tokens=tokens, talker_min_new_tokens=tokens, talker_do_sample=False,
        )  # fmt: skip
    hook.remove()
    likeliest = [tuple(each.topk(LIKELIEST).indices.tolist()) for each in logits]
    return list(zip(heard[0], likeliest, strict=False))  # the last code is not sounded


@dataclass(frozen=True, slots=True)
class Rounded:
    """A stage's model of transformers', what it says, and what its low precision rounds: how many products."""

    model: Any
    said: Callable[[Any, torch.Tensor, int], Said]
    round_weights: Callable[[Any], int]


STAGES = {
    "qwen2_5_omni thinker": Rounded(Qwen2_5OmniThinkerForConditionalGeneration, said, round_products),
    "qwen3_omni thinker": Rounded(Qwen3OmniMoeThinkerForConditionalGeneration, said, round_experts),
    "qwen3_omni talker": Rounded(
        Qwen3OmniMoeForConditionalGeneration, spoken, lambda model: round_experts(model.talker)
    ),
}


def compared(wanted: Said, found: Said) -> Iterator[tuple[bool, bool]]:
    """Of each token behind the same text: whether it is the same, and whether it is among the likeliest."""
    for (token, _), (other, likeliest) in zip(wanted, found, strict=True):
        yield token == other, token in likeliest
        if token != other:
            return


def prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[torch.Tensor]:
    draw = random.Random(0)
    for _ in range(count):
        message = " ".join(draw.choices(WORDS.split(), k=WORDS_A_PROMPT))
        turn = [{"role": "user", "content": [{"type": "text", "text": message}]}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        yield tokenizer(text, return_tensors="pt").input_ids


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--stage", choices=list(STAGES), default="qwen2_5_omni thinker")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    folder = options.folder or family_class(options.stage.split()[0]).embedded_checkpoint("tiny")
    stage = STAGES[options.stage]
    model = stage.model.from_pretrained(folder, dtype=torch.float32).eval()
    asked = list(prompts(AutoTokenizer.from_pretrained(folder), options.prompts))
    wanted = [stage.said(model, prompt, options.tokens) for prompt in asked]
    count = stage.round_weights(model)
    found = [stage.said(model, prompt, options.tokens) for prompt in asked]
    pairs = [pair for one, other in zip(wanted, found, strict=True) for pair in compared(one, other)]
    same, likely = (sum(column) for column in zip(*pairs, strict=True))
    print(f"{count} products rounded; {len(pairs)} tokens behind the same text of {len(asked)} replies")
    same_percent, likely_percent = 100 * same / len(pairs), 100 * likely / len(pairs)
    print(f"the same: {same_percent:.1f} %; among the {LIKELIEST} likeliest: {likely_percent:.1f} %")


if __name__ == "__main__":
    main()
