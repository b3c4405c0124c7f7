"""What the talker reads of a batch of conversations, and the codes that it is to say, as the server lays them out.

The rows of a prompt of `p` tokens go with the codec's mask, which has no embedding; then the voice's start with the
codec's pad; then a row of the reply for each code, from the codec's start on. Behind the reply's rows come the text's
end once, and its pad for ever (`omni_cluster/models/qwen2_5_omni/talker.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np
from torch.utils.data import Dataset

from training.batches import Batch, Batcher
from training.checkpoint import CODEC_MARKS, TOKENS
from training.codes import Codes
from training.durations import Durations
from training.texts import plain

PAD, START, END, MASK = CODEC_MARKS, CODEC_MARKS + 1, CODEC_MARKS + 2, CODEC_MARKS + 4
"""Of the codec."""
SPECIAL_ROWS: Final = (TOKENS.tts_text_end, TOKENS.tts_text_pad, *TOKENS.voices.values())
"""Tokens of the thinker whose embeddings are rows by themselves; a batch's own rows come before them."""
_TEXT_END, _TEXT_PAD, _FIRST_VOICE = range(3)
VOICES: Final = tuple(TOKENS.voices)


@dataclass(slots=True)
class TalkerBatch:
    """`b` spoken answers. `rows` `[b, n]`: which row each position has. `codes` `[b, n]`, `positions` `[3, b, n]`.

    `before`: flat indices of the positions that foretell `targets`; `owners`: of which answer each target is.
    `arrivals` `[b, tokens]`: where the row of each of the answer's tokens comes; 0: it has no such token.
    `tokens_of` `[targets, 2]`: of which tokens the word is that the target says, from and to; both 0: none.
    """

    rows: np.ndarray
    codes: np.ndarray
    positions: np.ndarray
    before: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    arrivals: np.ndarray
    tokens_of: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))


class TalkerBatches(Dataset[list[tuple[Batch, TalkerBatch]]]):
    """A step's conversations, and how their last answers are said, in either voice."""

    def __init__(self, batcher: Batcher, codes: Codes, durations: Durations, seed: int, misheard: float) -> None:
        """`misheard`: the share of codes that the talker is fed wrong, since it will hear its own mistakes."""
        self._batcher = batcher
        self._codes = codes
        self._durations = durations
        self._seed = seed
        self._misheard = misheard

    def __getitem__(self, step: int) -> list[tuple[Batch, TalkerBatch]]:
        rng = Random(f"speech {self._seed} {step}")
        return [(batch, self._of(batch, rng)) for batch in self._batcher[step]]

    def _of(self, batch: Batch, rng: Random) -> TalkerBatch:
        said = [self._codes[plain(reply.text)] for reply in batch.replies]
        voices = [rng.choice(VOICES) for _ in said]
        speech = talker_batch(batch, said, voices, [_misheard(codes, self._misheard, rng) for codes in said])
        texts = [reply.text for reply in batch.replies]
        speech.tokens_of = np.concatenate([self._tokens_of(*each) for each in zip(texts, said, strict=True)])
        return speech

    def _tokens_of(self, text: str, codes: Sequence[int]) -> np.ndarray:
        """From and to, of the word that each code, and then the end, says: int64 `[codes + 1, 2]`."""
        ends = np.cumsum(self._batcher.tokens_of_words(text))
        words = self._durations.words_of(plain(text), len(codes))
        spans = np.where((words < 0)[:, None], 0, np.stack([np.concatenate([[0], ends])[words], ends[words]], axis=1))
        return np.concatenate([spans, np.zeros((1, 2), np.int64)])


def _misheard(codes: Sequence[int], share: float, rng: Random) -> list[int]:
    return [rng.choice(codes) if rng.random() < share else code for code in codes]


def talker_batch(
    batch: Batch, said: Sequence[Sequence[int]], voices: Sequence[str], fed: Sequence[Sequence[int]]
) -> TalkerBatch:
    """`said`: codes of each answer; `fed`: what the talker is fed of them."""
    count, width = len(said), batch.ids.shape[1]
    longest = max(reply.begin + len(codes) for reply, codes in zip(batch.replies, said, strict=True)) + 2
    speech = TalkerBatch(
        rows=np.full((count, longest), count * width + _TEXT_PAD),
        codes=np.full((count, longest), MASK),
        positions=np.zeros((3, count, longest), np.int64),
        before=np.concatenate([
            number * longest + reply.begin + 1 + np.arange(len(codes) + 1)
            for number, (reply, codes) in enumerate(zip(batch.replies, said, strict=True))
        ]),
        targets=np.concatenate([[*codes, END] for codes in said]),
        owners=np.repeat(np.arange(count), [len(codes) + 1 for codes in said]),
        arrivals=np.zeros((count, max(reply.end - reply.begin for reply in batch.replies)), np.int64),
    )  # fmt: skip
    for number, reply in enumerate(batch.replies):
        own, begin = number * width, reply.begin
        voice = count * width + _FIRST_VOICE + VOICES.index(voices[number])
        rows = [*range(own, own + begin), voice, *range(own + begin, own + reply.end), count * width + _TEXT_END]
        speech.rows[number, : min(len(rows), longest)] = rows[:longest]
        speech.arrivals[number, : reply.end - begin] = begin + 1 + np.arange(reply.end - begin)
        speech.codes[number, begin : begin + 2 + len(fed[number])] = [PAD, START, *fed[number]]
        speech.positions[:, number, :begin] = batch.positions[:, number, :begin]
        speech.positions[:, number, begin:] = batch.positions[0, number, begin - 1] + 1 + np.arange(longest - begin)
    return speech
