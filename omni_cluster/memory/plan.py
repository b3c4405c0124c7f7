"""Memory of cards that stages share: named parts of every engine, and the division of what is left among KV caches.

All sizes are bytes on one card. Nothing here reads a checkpoint or a card: see `engine.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from omni_cluster.config.schema import StageConfig
from omni_cluster.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class FixedParts:
    """What one engine takes of a card beside its KV cache."""

    weights: int = 0
    activations: int = 0
    streams: int = 0
    cuda_graphs: int = 0
    cuda_context: int = 0
    margin: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """A KV cache's size: `least` it cannot do without, and `wanted`, above which more is of no use."""

    least: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that makes a stage smaller: `value` in steps of `step`, each of which takes `step_bytes`."""

    key: str
    value: int
    step: int
    step_bytes: int

    def fitting(self, excess_bytes: int) -> int:
        """The largest value that takes at least `excess_bytes` less; below 1 when there is none."""
        return (math.ceil(self.value / self.step) - math.ceil(excess_bytes / self.step_bytes)) * self.step


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """One engine of a stage on one card."""

    stage_id: int
    name: str
    fixed: FixedParts
    cache: CacheNeed
    knob: Knob

    @property
    def least(self) -> int:
        return self.fixed.total + self.cache.least


@dataclass(frozen=True, slots=True)
class Card:
    """`usable` bytes, and how many engines of which stages run there."""

    name: str
    usable: int
    engines: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What one engine was given of each of its cards."""

    stage_id: int
    name: str
    fixed: FixedParts
    kv_cache: int

    @property
    def total(self) -> int:
        return self.fixed.total + self.kv_cache


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every engine's memory by stage id, and the cards that it was planned for."""

    engines: Mapping[int, EngineMemory]
    cards: tuple[Card, ...]

    def taken(self, card: Card) -> int:
        return sum(self.engines[stage_id].total * count for stage_id, count in card.engines.items())


def plan_memory(needs: Sequence[EngineNeed], cards: Sequence[Card]) -> MemoryPlan:
    """Gives every engine its fixed parts and divides what is left of each card among the KV caches.

    A cache gets what it wants where all fit, else a share in proportion to that, and never less than its least.
    An engine on several cards has the smallest of its shares on each. Raises ConfigError for the first stage, in the
    order of `needs`, that does not fit beside those before it.
    """
    by_id = {need.stage_id: need for need in needs}
    shares = [_divide([need for need in needs if need.stage_id in card.engines], card) for card in cards]
    engines = {}
    for stage_id in dict.fromkeys(stage_id for card in cards for stage_id in card.engines):
        need = by_id[stage_id]
        kv_cache = min(share[stage_id] for share in shares if stage_id in share)
        engines[stage_id] = EngineMemory(stage_id, need.name, need.fixed, kv_cache)
    return MemoryPlan(engines, tuple(cards))


def _divide(needs: Sequence[EngineNeed], card: Card) -> dict[int, int]:
    """The KV cache of each engine on `card`, by stage id."""
    _refuse_what_does_not_fit(needs, card)
    counts = card.engines
    room = card.usable - sum(need.fixed.total * counts[need.stage_id] for need in needs)
    at_least: dict[int, int] = {}
    while True:
        free = [need for need in needs if need.stage_id not in at_least]
        wanted = sum(need.cache.wanted * counts[need.stage_id] for need in free)
        left = room - sum(size * counts[stage_id] for stage_id, size in at_least.items())
        shares = {
            need.stage_id: need.cache.wanted if wanted <= left else need.cache.wanted * left // wanted for need in free
        }
        short = {need.stage_id: need.cache.least for need in free if shares[need.stage_id] < need.cache.least}
        if not short:
            return at_least | shares
        at_least |= short


def _refuse_what_does_not_fit(needs: Sequence[EngineNeed], card: Card) -> None:
    before: list[EngineNeed] = []
    for need in needs:
        for _ in range(card.engines[need.stage_id]):
            left = card.usable - sum(other.least for other in before)
            if need.least > left:
                raise ConfigError(_does_not_fit(need, before, left, card))
            before.append(need)


def _does_not_fit(need: EngineNeed, before: Sequence[EngineNeed], left: int, card: Card) -> str:
    beside = f" beside {', '.join(f'{other.name} {gib(other.least)}' for other in before)}" if before else ""
    fitting = need.knob.fitting(need.least - left)
    smaller = f"set its {need.knob.key} to at most {fitting}" if fitting >= 1 else "give it less to hold"
    return (
        f"stage {need.stage_id} ({need.name}) does not fit on {card.name} of {gib(card.usable)} GiB{beside}: "
        f"it needs {gib(need.least)} GiB ({_parts(need)}) and {gib(max(0, left))} are left; {smaller}, "
        f"or use another card."
    )


def _parts(need: EngineNeed) -> str:
    named = [*part_names(need.fixed), ("KV cache of its longest sequence", need.cache.least)]
    return ", ".join(f"{name} {gib(size)}" for name, size in named if size)


def part_names(parts: FixedParts) -> list[tuple[str, int]]:
    """The parts by the names that a reader sees."""
    names = {"cuda_graphs": "CUDA graphs", "cuda_context": "CUDA context"}
    return [(names.get(field.name, field.name), getattr(parts, field.name)) for field in fields(parts)]


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"


def cards_of_replicas(stages: Sequence[StageConfig], usable: int) -> tuple[Card, ...]:
    """The cards of a cluster whose cards have `usable` bytes each.

    A pinned card has all replicas of the stages that name it. Shares that come to at most one card may all meet there;
    where they come to more, Ray decides who meets whom, and a replica may take no more than its share of a card.
    """
    pinned: dict[int, dict[int, int]] = {}
    for stage in stages:
        for number in stage.gpus or ():
            pinned.setdefault(number, {})[stage.stage_id] = stage.max_replicas
    cards = [Card(f"GPU {number}", usable, engines) for number, engines in sorted(pinned.items())]
    whole = [stage for stage in stages if stage.gpus is None and stage.gpus_per_replica >= 1]
    cards += [Card(f"each card of {stage.model_stage}", usable, {stage.stage_id: 1}) for stage in whole]
    return (*cards, *_fractional_cards([s for s in stages if s.gpus is None and 0 < s.gpus_per_replica < 1], usable))


def _fractional_cards(stages: Sequence[StageConfig], usable: int) -> Iterator[Card]:
    if not stages:
        return
    # fsum rounds once: shares that add up to 1 do so here too.
    if math.fsum(stage.gpus_per_replica * stage.max_replicas for stage in stages) <= 1:
        yield Card("the shared card", usable, {stage.stage_id: stage.max_replicas for stage in stages})
        return
    for stage in stages:
        share = math.floor(usable * stage.gpus_per_replica)
        yield Card(f"{stage.gpus_per_replica:g} of a card", share, {stage.stage_id: 1})


def cards_of_one_process(stages: Sequence[StageConfig], usable: int, first: int = 0) -> dict[int, Card]:
    """The cards, by number, of a process that runs one engine of each stage: without `gpus` from number `first` on."""
    engines: dict[int, dict[int, int]] = {}
    for stage in stages:
        if stage.gpus_per_replica > 0:
            for number in stage.gpus or range(first, first + stage.tensor_parallel_size):
                engines.setdefault(number, {})[stage.stage_id] = 1
    return {number: Card(f"GPU {number}", usable, on_card) for number, on_card in sorted(engines.items())}


def render_memory(plan: MemoryPlan) -> str:
    """`plan` as plain text for a terminal: a table of the parts of every engine on every card, in GiB."""
    rows = [row for card in plan.cards for row in _card_rows(plan, card)]
    header = ("card", "stage", "engines", *(name for name, _ in part_names(FixedParts())), "KV cache", "each", "GiB")
    return "\n".join(_columns([header, *rows])) + "\n"


def _card_rows(plan: MemoryPlan, card: Card) -> Iterator[tuple[str, ...]]:
    blank = [""] * (len(fields(FixedParts)) + 2)
    for stage_id, count in card.engines.items():
        engine = plan.engines[stage_id]
        parts = [size for _, size in part_names(engine.fixed)]
        sizes = map(gib, (*parts, engine.kv_cache, engine.total, engine.total * count))
        yield (card.name, engine.name, str(count), *sizes)
    taken = plan.taken(card)
    yield (card.name, "left", "", *blank, gib(card.usable - taken))
    yield (card.name, "usable", "", *blank, gib(card.usable))


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
