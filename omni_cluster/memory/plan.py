"""The division of cards among engines: their fixed parts, and what is left among their KV caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from omni_cluster.config.plan import columns
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.memory.devices import Card
from omni_cluster.memory.needs import EngineNeed, FixedParts, given_args, part_names
from omni_cluster.memory.sizes import gib
from omni_cluster.types.errors import ConfigError


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
    smaller = f"set its {need.knob.key} to at most {fitting}" if fitting >= 1 else "lower its limits"
    return (
        f"stage {need.stage_id} ({need.name}) does not fit on {card.name} of {gib(card.usable)} GiB{beside}: "
        f"it needs {gib(need.least)} GiB ({_parts(need)}) and {gib(max(0, left))} are left; {smaller}, "
        f"or use another card."
    )


def _parts(need: EngineNeed) -> str:
    named = [*part_names(need.fixed), ("KV cache of its longest sequence", need.cache.least)]
    return ", ".join(f"{name} {gib(size)}" for name, size in named if size)


def with_memory(config: PipelineConfig, plan: MemoryPlan, card_bytes: int) -> PipelineConfig:
    """`config` with the plan as engine arguments, for cards of `card_bytes`.

    What vLLM 0.32 does with them: with `kv_cache_memory_bytes` the cache has that size and nothing is measured; only
    `gpu_memory_utilization` of the card must be free when the engine starts (`request_memory`), which is therefore set
    to what the engine still has to take at that point.
    """
    stages = [
        _stage_with_memory(stage, plan.engines[stage.stage_id], card_bytes) if stage.stage_id in plan.engines else stage
        for stage in config.stages
    ]
    return config.model_copy(update={"stages": stages})


def _stage_with_memory(stage: StageConfig, engine: EngineMemory, card_bytes: int) -> StageConfig:
    """The configuration's own sizes win."""
    if stage.engine_args.get("gpu_memory_utilization") is not None:
        return stage
    # The context is there before vLLM looks at what is free.
    to_take = engine.total - engine.fixed.cuda_context - engine.fixed.margin
    computed = {"gpu_memory_utilization": to_take / card_bytes}
    if engine.kv_cache:
        computed["kv_cache_memory_bytes"] = engine.kv_cache
    return stage.model_copy(update={"engine_args": {**computed, **given_args(stage)}})


def render_memory(plan: MemoryPlan) -> str:
    """`plan` as plain text for a terminal: a table of the parts of every engine on every card, in GiB."""
    rows = [row for card in plan.cards for row in _card_rows(plan, card)]
    header = ("card", "stage", "engines", *(name for name, _ in part_names(FixedParts())), "KV cache", "each", "GiB")
    return "\n".join(columns([header, *rows])) + "\n"


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
