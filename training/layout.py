"""Conversations as the server lays them out for the thinker: token ids, positions, and what is learnt of them.

The fast way of what the chat template, the processor and `get_rope_index` do; tests compare it with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from omni_cluster.models.prompts import PromptMaker
from training.checkpoint import TOKENS

DEFAULT_SYSTEM: Final = "You are a helpful assistant."
"""What the template says where a conversation has no system prompt."""
_START, _END = TOKENS.id_of("<|im_start|>"), TOKENS.id_of("<|im_end|>")
_SOUND = TOKENS.id_of("<|AUDIO|>")
_SOUND_MARKS = TOKENS.id_of("<|audio_bos|>"), TOKENS.id_of("<|audio_eos|>")
_PICTURE = TOKENS.id_of("<|IMAGE|>")
_PICTURE_MARKS = TOKENS.id_of("<|vision_bos|>"), TOKENS.id_of("<|vision_eos|>")


@dataclass(frozen=True, slots=True)
class Sound:
    """A place for a sound of `tokens` tokens. `source`: what the layout's reader knows it by."""

    tokens: int
    source: Any = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A place for a picture of `rows` x `columns` tokens. `source`: what the layout's reader knows it by."""

    rows: int
    columns: int
    source: Any = None

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


Part = str | Sound | Seen


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked, in parts, and its answer, None if there was none. `is_learnt`: not where it was cut off."""

    parts: tuple[Part, ...]
    answer: str | None
    is_learnt: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """`system`: None for the template's own."""

    turns: tuple[Turn, ...]
    system: str | None = None


@dataclass(slots=True)
class Laid:
    """A conversation of `n` tokens.

    `positions` `[3, n]`. `learnt`: indices of the tokens that are to be foretold; the last turn's begin at `last_from`
    of these. `places`: where the tokens of each sound and picture begin, in their order.
    """

    ids: list[int] = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), np.int64))
    learnt: list[int] = field(default_factory=list)
    last_from: int = 0
    places: list[tuple[int, Sound | Seen]] = field(default_factory=list)


class Layout:
    """Lays conversations out by the checkpoint's tokenizer."""

    def __init__(self, prompts: PromptMaker) -> None:
        self._text_ids = lru_cache(100_000)(lambda text: tuple(prompts.text_ids(text)))

    def lay(self, conversation: Conversation) -> Laid:
        """The whole conversation, its last answer with it."""
        laid = Laid()
        system = DEFAULT_SYSTEM if conversation.system is None else conversation.system
        self._say(laid, f"system\n{system}")
        for turn in conversation.turns:
            self._ask(laid, turn.parts)
            if turn.answer is not None:
                self._answer(laid, turn.answer, turn.is_learnt)
        laid.positions = _positions(len(laid.ids), laid.places)
        return laid

    def text_ids(self, text: str) -> tuple[int, ...]:
        return self._text_ids(text)

    def _say(self, laid: Laid, text: str) -> None:
        laid.ids += (_START, *self._text_ids(text), _END, *self._text_ids("\n"))

    def _ask(self, laid: Laid, parts: Sequence[Part]) -> None:
        text = "user\n"
        laid.ids.append(_START)
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            laid.ids += self._text_ids(text) if text else ()
            self._place(laid, part)
            text = ""
        laid.ids += (*(self._text_ids(text) if text else ()), _END, *self._text_ids("\n"))

    @staticmethod
    def _place(laid: Laid, part: Sound | Seen) -> None:
        begin, end = _SOUND_MARKS if isinstance(part, Sound) else _PICTURE_MARKS
        token = _SOUND if isinstance(part, Sound) else _PICTURE
        laid.places.append((len(laid.ids) + 1, part))
        laid.ids += (begin, *(token,) * part.tokens, end)

    def _answer(self, laid: Laid, answer: str, is_learnt: bool) -> None:
        laid.last_from = len(laid.learnt)
        laid.ids += (_START, *self._text_ids("assistant\n"))
        begin = len(laid.ids)
        laid.ids += (*self._text_ids(answer), _END)
        if is_learnt:
            laid.learnt += range(begin, len(laid.ids))
        laid.ids += self._text_ids("\n")


def _positions(length: int, places: Sequence[tuple[int, Sound | Seen]]) -> np.ndarray:
    return np.concatenate([*_pieces(length, places)], axis=1)


def _pieces(length: int, places: Sequence[tuple[int, Sound | Seen]]) -> Iterator[np.ndarray]:
    """Text and sound count on. A picture has one time, rows and columns; what follows counts on from the largest."""
    done = following = 0
    for begin, part in places:
        if isinstance(part, Sound):
            continue
        yield _line(following, begin - done)
        following += begin - done
        row, column = np.divmod(np.arange(part.tokens), part.columns)
        yield np.stack([np.zeros_like(row), row, column]) + following
        following += max(part.rows, part.columns)
        done = begin + part.tokens
    yield _line(following, length - done)


def _line(start: int, length: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + length), (3, length))
