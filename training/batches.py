"""What a step of the thinker's training reads: conversations of the small world, those of like lengths together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np
from torch.utils.data import Dataset

from omni_cluster.models.chat_family import READ_ALOUD
from omni_cluster.models.qwen2_5_omni.hearing import RECOGNITION
from training.layout import Conversation, Laid, Layout, Part, Seen, Sound, Turn
from training.pool import Pool
from training.prompts import SPEAKING, SYSTEM_PROMPTS, TRANSCRIBE
from training.recordings import Hearing, drawn_hearing, examined_hearing
from training.texts import Texts, written
from training.typed import typed
from training.world import Item, Kind, Split, draw

TOKEN_PIXELS: Final = 28


@dataclass(frozen=True, slots=True)
class Mix:
    """Of a hundred: `spoken` turns, of the rest typed; `shown` items with a picture; `transcripts` to write; `later`
    conversations with up to three earlier turns, and `long` ones with up to ten; `aloud` texts to be read."""

    spoken: int = 60
    shown: int = 12
    transcripts: int = 15
    later: int = 33
    long: int = 7
    aloud: int = 0


TYPED_ONLY: Final = Mix(spoken=0, shown=0, transcripts=0, later=10, long=0)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and its tokens' places in the conversation: from `begin`, with the mark of its end at `end`."""

    begin: int
    end: int
    text: str


@dataclass(slots=True)
class Batch:
    """`b` conversations of up to `n` tokens.

    `ids` `[b, n]`, `positions` `[3, b, n]`. `before`: flat indices of the tokens that foretell `targets`; `owners`: of
    which conversation each target is. `kinds`: of the conversations. Rows of sounds and pictures go to flat indices:
    of a sound or picture number `*_of`, its row `*_row`, to `*_to`. `said`: by each sound.
    `shown`: pictures of the pool, by their size in tokens. `replies`: each conversation's last answer.
    """

    ids: np.ndarray
    positions: np.ndarray
    before: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    kinds: list[str]
    replies: list[Reply]
    hearings: list[Hearing] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    sound_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    sound_row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    sound_to: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    shown: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    shown_to: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation, and of what kind its last turn is."""

    kind: str
    conversation: Conversation


class Conversations:
    """Draws conversations of a pool's split."""

    def __init__(
        self, pool: Pool, split: Split, mix: Mix, items: Sequence[Item] = (), texts: Texts | None = None
    ) -> None:
        """`items`: what is typed; any of the world's, unless they are given. `texts`: what is read aloud."""
        self._items = items
        self._texts = texts or {}
        self._pool = pool
        self._split = split
        self._mix = mix

    def draw(self, rng: Random) -> Asked:
        if _chance(rng, self._mix.aloud):
            return self._aloud(rng)
        if _chance(rng, self._mix.transcripts):
            return Asked("transcript", self._transcript(rng))
        turns: list[Turn] = []
        for number in range(count := self._turns(rng)):
            item, turn = self._turn(rng, any(_has_picture(turn) for turn in turns))
            turns.append(turn if number == count - 1 else _interrupted(turn, rng))
        return Asked(item.kind, Conversation(tuple(turns), _system(rng)))

    def _aloud(self, rng: Random) -> Asked:
        kind = rng.choice([*self._texts])
        text = written(rng.choice(self._texts[kind]), rng)
        return Asked(f"aloud {kind}", Conversation((Turn((READ_ALOUD,), text),)))

    def transcript_of(self, piece: int, hearing: Hearing, question: str = TRANSCRIBE[0]) -> Conversation:
        return Conversation((Turn((question, sound_of(hearing)), self._pool.spoken[piece].question),), RECOGNITION)

    def _transcript(self, rng: Random) -> Conversation:
        piece = rng.randrange(len(self._pool.spoken))
        return self.transcript_of(piece, self._hearing(piece, rng), rng.choice(TRANSCRIBE))

    def _turns(self, rng: Random) -> int:
        if _chance(rng, self._mix.long):
            return rng.randint(5, 11)
        return rng.randint(2, 4) if _chance(rng, self._mix.later) else 1

    def _turn(self, rng: Random, had_picture: bool) -> tuple[Item, Turn]:
        is_spoken = _chance(rng, self._mix.spoken)
        if _chance(rng, self._mix.shown):
            number = rng.randrange(len(self._pool.shown))
            item = self._pool.shown[number]
            parts = [self.seen(number), self._question(item, is_spoken, rng)]
            if rng.random() < 0.3:
                parts.reverse()
            return item, Turn(tuple(parts), item.answer)
        while _asks_for_picture(item := self._item(is_spoken, rng), had_picture):
            pass
        return item, Turn((self._question(item, is_spoken, rng),), item.answer)

    def _item(self, is_spoken: bool, rng: Random) -> Item:
        return self._pool.spoken[rng.choice(self._pool.unseen)] if is_spoken else self._typed_item(rng)

    def _typed_item(self, rng: Random) -> Item:
        return rng.choice(self._items) if self._items else draw(rng, self._split)

    def _question(self, item: Item, is_spoken: bool, rng: Random) -> Part:
        if not is_spoken or not (pieces := self._pool.pieces_of.get(item.question)):
            return typed(item.question, rng)
        return sound_of(self._hearing(rng.choice(pieces), rng))

    def _hearing(self, piece: int, rng: Random) -> Hearing:
        return drawn_hearing(piece, self._pool.recorded(piece), rng)

    def seen(self, number: int) -> Seen:
        height, width = self._pool.pictures[number].shape[:2]
        return Seen(height // TOKEN_PIXELS, width // TOKEN_PIXELS, number)


def sound_of(hearing: Hearing) -> Sound:
    return Sound(hearing.tokens, hearing)


def _asks_for_picture(item: Item, had_picture: bool) -> bool:
    """Whether there is none to show it, or, where it asks for one that is not there, there was one before."""
    return item.picture is not None or (item.kind is Kind.PICTURE and had_picture)


def _has_picture(turn: Turn) -> bool:
    return any(isinstance(part, Seen) for part in turn.parts)


def _system(rng: Random) -> str | None:
    draw_ = rng.random()
    if draw_ < 0.4:
        return None
    if draw_ < 0.6:
        return SPEAKING
    if draw_ < 0.8:
        return rng.choice(SYSTEM_PROMPTS)
    return typed(draw(rng, Split.TRAIN, Kind.REPEAT).answer, rng)


def _interrupted(turn: Turn, rng: Random) -> Turn:
    """Now and then only the first words of the answer, or none, as when people talk over it."""
    if turn.answer is None or rng.random() > 0.15:
        return turn
    said = turn.answer.split()
    words = rng.randrange(-1, len(said))
    return Turn(turn.parts, None if words < 0 else " ".join(said[:words]), is_learnt=False)


def _chance(rng: Random, of_hundred: int) -> bool:
    return rng.random() * 100 < of_hundred


class Batcher(Dataset[list[Batch]]):
    """The batches of each step, the same for the same seed and step. It is what workers of a loader share."""

    def __init__(
        self, conversations: Conversations, layout: Layout, pool: Pool, seed: int, size: int, most_tokens: int
    ) -> None:
        """`size`: conversations of a step. `most_tokens`: of a batch, with its padding."""
        self._conversations = conversations
        self._layout = layout
        self._pool = pool
        self._seed = seed
        self._size = size
        self._most_tokens = most_tokens

    def __getitem__(self, step: int) -> list[Batch]:
        rng = Random(f"{self._seed} {step}")
        return self.of([self._conversations.draw(rng) for _ in range(self._size)])

    def tokens_of_words(self, text: str) -> list[int]:
        """How many each word has. No token is of two words."""
        words = text.split()
        return [len(self._layout.text_ids(f" {word}" if place else word)) for place, word in enumerate(words)]

    def of(self, asked: Sequence[Asked]) -> list[Batch]:
        laid = [(each, self._layout.lay(each.conversation)) for each in asked]
        laid.sort(key=lambda each: len(each[1].ids))
        return [self._batch(group) for group in self._groups(laid)]

    def _groups(self, laid: Sequence[tuple[Asked, Laid]]) -> Iterator[Sequence[tuple[Asked, Laid]]]:
        begin = 0
        for end in range(1, len(laid) + 1):
            if end == len(laid) or (end + 1 - begin) * len(laid[end][1].ids) > self._most_tokens:
                yield laid[begin:end]
                begin = end

    def _batch(self, group: Sequence[tuple[Asked, Laid]]) -> Batch:
        longest = len(group[-1][1].ids)
        ids = np.zeros((len(group), longest), np.int64)
        positions = np.zeros((3, len(group), longest), np.int64)
        before, targets, owners = [], [], []
        for number, (_, laid) in enumerate(group):
            ids[number, : len(laid.ids)] = laid.ids
            positions[:, number, : len(laid.ids)] = laid.positions
            learnt = np.asarray(laid.learnt, np.int64)
            before.append(learnt - 1 + number * longest)
            targets.append(ids[number, learnt])
            owners.append(np.full(len(learnt), number))
        batch = Batch(
            ids, positions, np.concatenate(before), np.concatenate(targets), np.concatenate(owners),
            [asked.kind for asked, _ in group], [_reply(asked, laid) for asked, laid in group],
        )  # fmt: skip
        self._put_media(batch, group, longest)
        return batch

    def _put_media(self, batch: Batch, group: Sequence[tuple[Asked, Laid]], longest: int) -> None:
        sounds: list[tuple[np.ndarray, ...]] = []
        shown_to = defaultdict[tuple[int, int], list[np.ndarray]](list)
        for number, (_, laid) in enumerate(group):
            for begin, part in laid.places:
                row = np.arange(part.tokens)
                to = row + begin + number * longest
                if isinstance(part, Seen):
                    batch.shown.setdefault((part.rows, part.columns), []).append(part.source)
                    shown_to[part.rows, part.columns].append(to)
                    continue
                sounds.append((np.full_like(row, len(batch.hearings)), row, to))
                batch.hearings.append(part.source)
                batch.said.append(self._pool.spoken[part.source.piece].question)
        if sounds:
            batch.sound_of, batch.sound_row, batch.sound_to = map(np.concatenate, zip(*sounds, strict=True))
        batch.shown_to = {size: np.concatenate(to) for size, to in shown_to.items()}


def _reply(asked: Asked, laid: Laid) -> Reply:
    return Reply(laid.learnt[laid.last_from], laid.learnt[-1], asked.conversation.turns[-1].answer or "")


def examination(pool: Pool, conversations: Conversations, count: int, seed: int = 0) -> Iterator[Asked]:
    """Items of the pool that are not trained on: each question typed, spoken and to be written down; each picture asked
    for by text and by voice."""
    rng = Random(f"examination {seed}")
    for piece in range(min(count, len(pool.spoken))):
        item, heard = pool.spoken[piece], examined_hearing(piece, pool.recorded(piece), rng)
        yield Asked("transcript", conversations.transcript_of(piece, heard))
        if item.picture is None:
            yield Asked(f"typed {item.kind}", Conversation((Turn((item.question,), item.answer),)))
            yield Asked(f"spoken {item.kind}", Conversation((Turn((sound_of(heard),), item.answer),)))
    for number in range(min(count // 4, len(pool.shown))):
        item, seen = pool.shown[number], conversations.seen(number)
        yield Asked("typed picture shown", Conversation((Turn((seen, item.question), item.answer),)))
        if pieces := pool.pieces_of.get(item.question):
            piece = rng.choice(pieces)
            asked = sound_of(examined_hearing(piece, pool.recorded(piece), rng))
            yield Asked("spoken picture shown", Conversation((Turn((seen, asked), item.answer),)))
