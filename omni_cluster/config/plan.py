"""What a configuration comes to: stages in the order of the data, their devices, memory and hand-overs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from omni_cluster.config.caches import compiled_folder
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.config.sharing import by_fractions, on_pinned_cards
from omni_cluster.types.errors import ConfigError
from omni_cluster.types.modalities import Modality

_KIB = 1 << 10


@dataclass(frozen=True)
class StagePlan:
    """One stage as it will run; `inputs` and `outputs` name other stages, `cards` are pinned device numbers."""

    stage_id: int
    name: str
    replicas: str
    gpus_per_replica: float
    memory: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    final_output_type: Modality | None
    cards: tuple[int, ...]


@dataclass(frozen=True)
class CardShare:
    """Engines that share one card; `memory_fraction` bounds the parts of its memory that they state, in sum."""

    card: str
    engines: tuple[str, ...]
    memory_fraction: float


@dataclass(frozen=True)
class Plan:
    """A resolved deployment: stages in topological order, GPUs at the fewest and the most replicas.

    `compiled`: the folder of what engines compile, as it is on this host.
    """

    model: str
    family: str
    compiled: str
    stages: tuple[StagePlan, ...]
    shared_cards: tuple[CardShare, ...]
    min_gpus: float
    max_gpus: float


def resolve_plan(config: PipelineConfig) -> Plan:
    """Work out what `config` comes to.

    Raises:
        ConfigError: the engines pinned to one card state more than the whole of its memory.
    """
    _refuse_overfull_cards(config.stages)
    ordered = in_data_order(config.stages)
    return Plan(
        model=config.model,
        family=config.family,
        compiled=str(compiled_folder(config.cache_dir)),
        stages=tuple(_plan_stage(stage, ordered) for stage in ordered),
        shared_cards=(*_pinned_shares(config.stages), *_fractional_shares(config.stages)),
        min_gpus=_total_gpus(config.stages, [stage.min_replicas for stage in config.stages]),
        max_gpus=_total_gpus(config.stages, [stage.max_replicas for stage in config.stages]),
    )


def render_plan(plan: Plan) -> str:
    """`plan` as plain text for a terminal: a table of the stages, the hand-overs, shared cards and total GPUs."""
    lines = [f"model {plan.model}, family {plan.family}", "", *_table(plan.stages), ""]
    if hand_overs := [f"{source} -> {stage.name}" for stage in plan.stages for source in stage.inputs]:
        lines.append(f"transfers: {', '.join(hand_overs)}")
    lines.extend(_shared_line(share) for share in plan.shared_cards)
    lines.append(f"compiled kernels and graphs: {plan.compiled}")
    lines.append(f"total GPUs: {_span(plan.min_gpus, plan.max_gpus)}")
    return "\n".join(lines) + "\n"


def in_data_order(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Sources before their consumers."""
    by_id = {stage.stage_id: stage for stage in stages}
    sorter = TopologicalSorter({stage.stage_id: stage.engine_input_source for stage in stages})
    return [by_id[stage_id] for stage_id in sorter.static_order()]


def _plan_stage(stage: StageConfig, stages: Sequence[StageConfig]) -> StagePlan:
    return StagePlan(
        stage_id=stage.stage_id,
        name=stage.model_stage,
        replicas=_span(stage.min_replicas, stage.max_replicas),
        gpus_per_replica=stage.gpus_per_replica,
        memory=_memory(stage),
        inputs=tuple(other.model_stage for other in stages if other.stage_id in stage.engine_input_source),
        outputs=tuple(other.model_stage for other in stages if stage.stage_id in other.engine_input_source),
        final_output_type=stage.final_output_type,
        cards=tuple(stage.gpus or ()),
    )


def _memory(stage: StageConfig) -> str:
    fraction, size_bytes = _stated_fraction(stage), stage.engine_args.get("kv_cache_memory_bytes")
    of_card = [f"{fraction:.2f} of the card"] if fraction else []
    for_cache = [f"{_binary_size(size_bytes)} KV cache"] if size_bytes else []
    in_sum = [f"{stage.memory_gib:g} GiB of the card"] if stage.memory_gib else []
    unstated = "computed at start" if stage.gpus_per_replica else "not stated"
    return ", ".join(in_sum + of_card + for_cache) or unstated


def _binary_size(size_bytes: int) -> str:
    power = min(3, max(0, size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes / _KIB**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _total_gpus(stages: Sequence[StageConfig], replicas: Sequence[int]) -> float:
    scheduled = (count * stage.scheduled_gpus for stage, count in zip(stages, replicas, strict=True))
    return len(on_pinned_cards(stages)) + math.fsum(scheduled)


def _cards(stages: Sequence[StageConfig]) -> dict[int, list[StageConfig]]:
    """The engines on each pinned card: a stage stands there once a replica."""
    by_id = {stage.stage_id: stage for stage in stages}
    return {
        card: [by_id[stage_id] for stage_id, count in engines.items() for _ in range(count)]
        for card, engines in on_pinned_cards(stages).items()
    }


def _stated_fraction(stage: StageConfig) -> float:
    # Counts beside kv_cache_memory_bytes too: vLLM wants that much free at start, whatever the cache then takes.
    return float(stage.engine_args.get("gpu_memory_utilization") or 0)


def _refuse_overfull_cards(stages: Sequence[StageConfig]) -> None:
    for card, engines in _cards(stages).items():
        # fsum rounds once: decimals that add up to 1 do so here too.
        total = math.fsum(map(_stated_fraction, engines))
        if total > 1:
            raise ConfigError(_overfull(card, engines, total, stages))


def _overfull(card: int, engines: Sequence[StageConfig], total: float, stages: Sequence[StageConfig]) -> str:
    stating = [engine for engine in engines if _stated_fraction(engine) > 0]
    first = stating[0]
    even = math.floor(100 / len(stating)) / 100
    return (
        f"stages[{stages.index(first)}].engine_args.gpu_memory_utilization is {_stated_fraction(first):g}; "
        f"the engines on GPU {card} ({_named(stating)}) take {total:.2f} of its memory together, "
        f"keep the sum at most 1.0, for example {even:g} each."
    )


def _pinned_shares(stages: Sequence[StageConfig]) -> Iterator[CardShare]:
    for card, engines in _cards(stages).items():
        if len(engines) > 1:
            described = tuple(f"{engine.model_stage} {_memory(engine)}" for engine in engines)
            yield CardShare(f"GPU {card}", described, math.fsum(map(_stated_fraction, engines)))


def _fractional_shares(stages: Sequence[StageConfig]) -> Iterator[CardShare]:
    engines = by_fractions(stages)
    if sum(engine.max_replicas for engine in engines) > 1:
        described = tuple(f"{stage.model_stage} {stage.gpus_per_replica:g} GPU, {_memory(stage)}" for stage in engines)
        yield CardShare("a card shared by fractions", described, _fullest_card(engines))


def _fullest_card(engines: Sequence[StageConfig]) -> float:
    """Bound for any placement by Ray: all replicas on one card, or a card full of the greediest stage."""
    everything = math.fsum(_stated_fraction(engine) * engine.max_replicas for engine in engines)
    greediest = max(_stated_fraction(engine) / engine.gpus_per_replica for engine in engines)
    return min(everything, greediest)


def _named(engines: Sequence[StageConfig]) -> str:
    return ", ".join(f"{engine.model_stage} {_stated_fraction(engine):.2f}" for engine in engines)


def _table(stages: Sequence[StagePlan]) -> list[str]:
    header = ("id", "stage", "replicas", "GPUs", "memory", "from", "to")
    return columns([header, *(_row(stage) for stage in stages)])


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(stage: StagePlan) -> tuple[str, ...]:
    client = (f"client ({stage.final_output_type})",) if stage.final_output_type else ()
    return (
        str(stage.stage_id),
        stage.name,
        stage.replicas,
        f"{stage.gpus_per_replica:g}" + (f" ({_card_list(stage.cards)})" if stage.cards else ""),
        stage.memory,
        ", ".join(stage.inputs) or "client",
        ", ".join((*stage.outputs, *client)),
    )


def _card_list(cards: Sequence[int]) -> str:
    return "GPU " + ",".join(map(str, cards))


def _shared_line(share: CardShare) -> str:
    stated = f"; stated: at most {share.memory_fraction:.2f} of its memory" if share.memory_fraction else ""
    return f"{share.card}: {' + '.join(share.engines)}{stated}"


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"
