"""Requests of mixed lengths: how long each prompt and each answer is, and whether the prompt is spoken."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from omni_cluster.bench.errors import BenchError

TEXT_TOKENS_PER_S = 6.25
"""Spoken in a second, about."""
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
    codes_per_s: float | None = None
    """Of the model that is asked, which says it: `Load.of`."""

    def lengths(self, seed: int, place: int) -> Lengths:
        """Of the request at `place` of a cell: always the same ones."""
        if not self.codes_per_s:
            raise BenchError("the model says of no sound how long it is, so there is no mix; leave --mix out.")
        draw = random.Random(f"mix {seed} {place}")
        codes = round(log_uniform(draw, *self.sound_s) * self.codes_per_s)
        is_spoken = draw.random() < self.spoken_share
        fewest, most = self.prompt_tokens
        if is_spoken:
            most = max(fewest, min(most, int(MAX_SPOKEN_S * SPOKEN_TOKENS_PER_S)))
        prompt = round(log_uniform(draw, fewest, most))
        spoken_s = prompt / SPOKEN_TOKENS_PER_S if is_spoken else 0.0
        return Lengths(
            prompt, max(MIN_TEXT_TOKENS, round(codes * TEXT_TOKENS_PER_S / self.codes_per_s)), max(1, codes), spoken_s
        )


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))
