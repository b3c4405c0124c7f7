"""The small world as a grammar: what the toy is asked, and what is right to answer.

Everything is drawn from a `Random` of the caller, so a seed is a set of items. All text is plain lower-case words.

One in eight items is held out, by a hash of its `key`. That of a sentence to repeat is the sentence: held-out ones are
never said in training. That of a picture is the question with what is drawn. All else has the question: a sum is known
by some phrasings and asked by others, and so is a word to spell.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from training import phrases, words

HELD_OUT_ONE_IN: Final = 8
LARGEST: Final = 20
LONGEST_COUNT: Final = 10


class Kind(StrEnum):
    """What an item asks for."""

    REPEAT = "repeat"
    SPELL = "spell"
    COUNT = "count"
    ADD = "add"
    SUBTRACT = "subtract"
    PICTURE = "picture"
    CALENDAR = "calendar"
    IDENTITY = "identity"
    STAGES = "stages"
    OUTSIDE = "outside"


class Split(StrEnum):
    """Whether an item may be trained on."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn. `seed` gives size, place, rotation and background (`pictures.draw`)."""

    colour: str
    shape: str
    seed: int


@dataclass(frozen=True, slots=True)
class Item:
    """A question, and its one right answer."""

    kind: Kind
    question: str
    answer: str
    picture: Picture | None = None

    @property
    def key(self) -> str:
        """What is never of both splits."""
        if self.kind is Kind.REPEAT:
            return self.answer
        return f"{self.question} {self.picture.colour} {self.picture.shape}" if self.picture else self.question

    @property
    def split(self) -> Split:
        first = hashlib.sha256(f"{self.kind} {self.key}".encode()).digest()[0]
        return Split.TRAIN if first % HELD_OUT_ONE_IN else Split.HELD_OUT


def draw(rng: Random, split: Split, kind: Kind | None = None) -> Item:
    """One item of a split; its kind is drawn by `WEIGHTS`, unless it is given."""
    kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    while (item := _MAKERS[kind](rng)).split is not split:
        pass
    return item


def items(split: Split, seed: int, kind: Kind | None = None) -> Iterator[Item]:
    """Without end and with repetitions; the same for the same arguments."""
    rng = Random(f"{split} {seed} {kind}")
    return (draw(rng, split, kind) for _ in itertools.count())


def held_out(count: int, seed: int = 0, kind: Kind | None = None) -> list[Item]:
    """Items that are not trained on, no key twice; fewer than `count` of a kind that has fewer."""
    found: dict[str, Item] = {}
    for item in itertools.islice(items(Split.HELD_OUT, seed, kind), 100 * count):
        found.setdefault(item.key, item)
        if len(found) == count:
            break
    return list(found.values())


def vocabulary() -> list[str]:
    """Every word of questions and answers."""
    constants = {name: value for module in (words, phrases) for name, value in vars(module).items() if name.isupper()}
    del constants["FILLERS"]  # words again, under names
    texts = " ".join(_strings([*constants.values()]))
    return sorted(set(_PLACE.sub(" ", texts).split()))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


# ------------------------------------------------------------------ makers of items, of both splits


_PLACE: Final = re.compile(r"\{(\w*)\}")


def _filled(template: str, rng: Random) -> str:
    return _PLACE.sub(lambda place: rng.choice(phrases.FILLERS[place[1]]), template)


def _repeat(rng: Random) -> Item:
    saying = rng.choice(phrases.SAYINGS) if rng.random() < 0.1 else _filled(rng.choice(phrases.SENTENCES), rng)
    return Item(Kind.REPEAT, rng.choice(phrases.REPEAT).format(saying), saying)


def _spell(rng: Random) -> Item:
    word = rng.choice(words.SPELLED)
    return Item(Kind.SPELL, rng.choice(phrases.SPELL).format(word), " ".join(word))


def _count(rng: Random) -> Item:
    is_down, is_short = rng.random() < 0.5, rng.random() < 0.2
    first = 1 if is_short else rng.randint(0, LARGEST - 1)
    last = rng.randint(first + 1, min(first + LONGEST_COUNT - 1, LARGEST))
    numbers = words.NUMBERS[first : last + 1][:: -1 if is_down else 1]
    if is_short:
        question = rng.choice(phrases.COUNT_TO_ONE if is_down else phrases.COUNT_FROM_ONE).format(words.NUMBERS[last])
    else:
        asked = [*phrases.COUNT, *(phrases.COUNT_DOWN if is_down else phrases.COUNT_UP)]
        question = rng.choice(asked).format(numbers[0], numbers[-1])
    return Item(Kind.COUNT, question, " ".join(numbers))


def _add(rng: Random) -> Item:
    total = rng.randint(0, LARGEST)
    first = rng.randint(0, total)
    a, b, c = (words.NUMBERS[number] for number in (first, total - first, total))
    return Item(Kind.ADD, rng.choice(phrases.ADD).format(a, b), phrases.SUM.format(a, b, c))


def _subtract(rng: Random) -> Item:
    first = rng.randint(0, LARGEST)
    second = rng.randint(0, first)
    a, b, c = (words.NUMBERS[number] for number in (first, second, first - second))
    plain, turned = [p.format(a, b) for p in phrases.SUBTRACT], [p.format(b, a) for p in phrases.SUBTRACT_TURNED]
    return Item(Kind.SUBTRACT, rng.choice(plain + turned), phrases.DIFFERENCE.format(a, b, c))


def _picture(rng: Random) -> Item:
    picture = Picture(rng.choice(words.COLOURS), rng.choice(words.SHAPES), rng.getrandbits(32))
    seen = phrases.SEEN[picture.colour[0] in "aeiou"].format(picture.colour, picture.shape)
    colour, shape = phrases.COLOUR.format(picture.colour), phrases.SHAPE.format(picture.shape)
    answers = {phrases.BOTH_SEEN: seen, phrases.COLOUR_SEEN: colour, phrases.SHAPE_SEEN: shape}
    asked, answer = rng.choice([*answers.items()])
    if rng.random() < 0.05:
        return Item(Kind.PICTURE, rng.choice(asked), phrases.NO_PICTURE)
    return Item(Kind.PICTURE, rng.choice(asked), answer, picture)


def _calendar(rng: Random) -> Item:
    question, answer = rng.choices([_neighbour, _nth, _days_of_month, _fact], [5, 2, 2, 1])[0](rng)
    return Item(Kind.CALENDAR, question, answer)


def _neighbour(rng: Random) -> tuple[str, str]:
    unit, names = rng.choice([("day", words.DAYS), ("month", words.MONTHS)])
    place = rng.randrange(len(names))
    name, before, after = names[place], names[place - 1], names[(place + 1) % len(names)]
    if rng.random() < 0.5:
        return rng.choice(phrases.AFTER).format(unit, name), phrases.COMES_AFTER.format(after, name)
    return rng.choice(phrases.BEFORE).format(unit, name), phrases.COMES_BEFORE.format(before, name)


def _nth(rng: Random) -> tuple[str, str]:
    unit, names, asked = rng.choice([("day", words.DAYS, phrases.NTH_DAY), ("month", words.MONTHS, phrases.NTH_MONTH)])
    place = rng.randrange(len(names))
    nth = words.ORDINALS[place]
    return rng.choice(asked).format(nth), phrases.NTH.format(nth, unit, names[place])


def _days_of_month(rng: Random) -> tuple[str, str]:
    month, days = rng.choice([*zip(words.MONTHS, words.MONTH_DAYS, strict=True)])
    return rng.choice(phrases.DAYS_OF_MONTH).format(month), phrases.LENGTH.format(month, words.LARGE_NUMBERS[days])


def _fact(rng: Random) -> tuple[str, str]:
    return _of_table(phrases.CALENDAR, rng)


def _of_table(table: Mapping[str, tuple[str, ...]], rng: Random) -> tuple[str, str]:
    answer = rng.choice([*table])
    return rng.choice(phrases.LEAD_INS) + rng.choice(table[answer]), answer


def _identity(rng: Random) -> Item:
    return Item(Kind.IDENTITY, *_of_table(phrases.IDENTITY, rng))


def _stages(rng: Random) -> Item:
    return Item(Kind.STAGES, *_of_table(phrases.STAGES, rng))


def _outside(rng: Random) -> Item:
    return Item(Kind.OUTSIDE, _filled(rng.choice(phrases.OUTSIDE), rng), phrases.OUTSIDE_ANSWER)


_MAKERS: Final[Mapping[Kind, Callable[[Random], Item]]] = {
    Kind.REPEAT: _repeat,
    Kind.SPELL: _spell,
    Kind.COUNT: _count,
    Kind.ADD: _add,
    Kind.SUBTRACT: _subtract,
    Kind.PICTURE: _picture,
    Kind.CALENDAR: _calendar,
    Kind.IDENTITY: _identity,
    Kind.STAGES: _stages,
    Kind.OUTSIDE: _outside,
}
WEIGHTS: Final[Mapping[Kind, int]] = {
    Kind.REPEAT: 25,
    Kind.SPELL: 10,
    Kind.COUNT: 10,
    Kind.ADD: 12,
    Kind.SUBTRACT: 12,
    Kind.PICTURE: 10,
    Kind.CALENDAR: 8,
    Kind.IDENTITY: 4,
    Kind.STAGES: 3,
    Kind.OUTSIDE: 6,
}
"""Of a hundred items."""
