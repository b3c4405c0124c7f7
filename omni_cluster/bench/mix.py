"""Requests of mixed lengths: how long each prompt and each answer is, and whether the prompt is spoken."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

CODES_PER_S = 50
"""Codec tokens of a second of sound."""
CODES_A_TEXT_TOKEN = 8
"""About six tokens of text are spoken in a second."""
MIN_TEXT_TOKENS = 2
"""A reply of one token is the end of one: there is nothing to speak."""
SPOKEN_TOKENS_PER_S = 25
"""What a second of a spoken prompt is to the model."""
MAX_SPOKEN_S = 30.0
"""Of a spoken prompt: hardly anybody speaks longer in one turn."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What one request is. `spoken_s`: seconds of sound that the prompt is in place of words; 0: words."""

    prompt_tokens: int
    text_tokens: int
    codec_tokens: int
    spoken_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Between which lengths requests are, log-uniform: as many of 2 to 4 s of sound as of 10 to 20 s.

    `sound_s` is of the answer. `prompt_tokens` is of words and of sound alike, but no prompt is spoken for longer than
    `MAX_SPOKEN_S`. `spoken_share` of the prompts are spoken.
    """

    sound_s: tuple[float, float] = (2.0, 20.0)
    prompt_tokens: tuple[int, int] = (20, 2000)
    spoken_share: float = 0.5

    def lengths(self, seed: int, place: int) -> Lengths:
        """Of the request at `place` of a cell: always the same ones."""
        draw = random.Random(f"mix {seed} {place}")
        codes = round(log_uniform(draw, *self.sound_s) * CODES_PER_S)
        is_spoken = draw.random() < self.spoken_share
        fewest, most = self.prompt_tokens
        if is_spoken:
            most = max(fewest, min(most, int(MAX_SPOKEN_S * SPOKEN_TOKENS_PER_S)))
        prompt = round(log_uniform(draw, fewest, most))
        spoken_s = prompt / SPOKEN_TOKENS_PER_S if is_spoken else 0.0
        return Lengths(prompt, max(MIN_TEXT_TOKENS, round(codes / CODES_A_TEXT_TOKEN)), max(1, codes), spoken_s)


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))
