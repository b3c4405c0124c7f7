"""What the talker reads of a batch of conversations, and the codes that it is to say, as the server lays them out.

The rows of a prompt of `p` tokens go with the codec's mask, which has no embedding; then the voice's start with the
codec's pad; then a row of the reply for each code, from the codec's start on. Behind the reply's rows come the text's
end once, and its pad for ever (`omni_cluster/models/qwen2_5_omni/talker.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
from torch.utils.data import Dataset

from training.batches import Batch, Batcher
from training.checkpoint import CODEC_MARKS, TOKENS

PAD, START, END, MASK = CODEC_MARKS, CODEC_MARKS + 1, CODEC_MARKS + 2, CODEC_MARKS + 4
"""Of the codec."""
SPECIAL_ROWS: Final = (TOKENS.tts_text_end, TOKENS.tts_text_pad, *TOKENS.voices.values())
"""Tokens of the thinker whose embeddings are rows by themselves; a batch's own rows come before them."""
_TEXT_END, _TEXT_PAD, _FIRST_VOICE = range(3)
VOICES: Final = tuple(TOKENS.voices)
Codes = Mapping[str, Sequence[int]]
"""Of what may be said, by its text."""


@dataclass(slots=True)
class Speech:
    """`b` spoken answers. `rows` `[b, n]`: which row each position has. `codes` `[b, n]`, `positions` `[3, b, n]`.

    `before`: flat indices of the positions that foretell `targets`; `owners`: of which answer each target is.
    """

    rows: np.ndarray
    codes: np.ndarray
    positions: np.ndarray
    before: np.ndarray
    targets: np.ndarray
    owners: np.ndarray


class Speeches(Dataset[list[tuple[Batch, Speech]]]):
    """A step's conversations, and how their last answers are said, in either voice."""

    def __init__(self, batcher: Batcher, codes: Codes, seed: int, misheard: float) -> None:
        """`misheard`: the share of codes that the talker is fed wrong, since it will hear its own mistakes."""
        self._batcher = batcher
        self._codes = codes
        self._seed = seed
        self._misheard = misheard

    def __getitem__(self, step: int) -> list[tuple[Batch, Speech]]:
        rng = Random(f"speech {self._seed} {step}")
        return [(batch, self._of(batch, rng)) for batch in self._batcher[step]]

    def __len__(self) -> int:
        return len(self._batcher)

    def _of(self, batch: Batch, rng: Random) -> Speech:
        said = [self._codes[reply.text] for reply in batch.replies]
        voices = [rng.choice(VOICES) for _ in said]
        return speech_of(batch, said, voices, [_misheard(codes, self._misheard, rng) for codes in said])


def _misheard(codes: Sequence[int], share: float, rng: Random) -> list[int]:
    return [rng.choice(codes) if rng.random() < share else code for code in codes]


def speech_of(
    batch: Batch, said: Sequence[Sequence[int]], voices: Sequence[str], fed: Sequence[Sequence[int]]
) -> Speech:
    """`said`: codes of each answer; `fed`: what the talker is fed of them."""
    count, width = len(said), batch.ids.shape[1]
    longest = max(reply.begin + len(codes) for reply, codes in zip(batch.replies, said, strict=True)) + 2
    speech = Speech(
        rows=np.full((count, longest), count * width + _TEXT_PAD),
        codes=np.full((count, longest), MASK),
        positions=np.zeros((3, count, longest), np.int64),
        before=np.concatenate([
            number * longest + reply.begin + 1 + np.arange(len(codes) + 1)
            for number, (reply, codes) in enumerate(zip(batch.replies, said, strict=True))
        ]),
        targets=np.concatenate([[*codes, END] for codes in said]),
        owners=np.repeat(np.arange(count), [len(codes) + 1 for codes in said]),
    )  # fmt: skip
    for number, reply in enumerate(batch.replies):
        own, begin = number * width, reply.begin
        voice = count * width + _FIRST_VOICE + VOICES.index(voices[number])
        rows = [*range(own, own + begin), voice, *range(own + begin, own + reply.end), count * width + _TEXT_END]
        speech.rows[number, : min(len(rows), longest)] = rows[:longest]
        speech.codes[number, begin : begin + 2 + len(fed[number])] = [PAD, START, *fed[number]]
        speech.positions[:, number, :begin] = batch.positions[:, number, :begin]
        speech.positions[:, number, begin:] = batch.positions[0, number, begin - 1] + 1 + np.arange(longest - begin)
    return speech
