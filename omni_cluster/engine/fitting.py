"""A pipeline with the memory of its engines set: computed by `memory`, checked before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omni_cluster.config.schema import PRESET_PREFIX, PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.cards import VARIABLE, visible_cards
from omni_cluster.memory.devices import CARD_RESERVE_BYTES, CardMemory, cards_of_one_process, cards_of_replicas
from omni_cluster.memory.needs import EngineNeed, engine_needs
from omni_cluster.memory.plan import MemoryPlan, plan_memory, with_memory
from omni_cluster.memory.sizes import ARSizes, StageSizes
from omni_cluster.models.lora import adapter_elements
from omni_cluster.types.errors import ConfigError
from omni_cluster.vllm_engine.card_memory import measure_cards


def fit_process(bound: BoundPipeline) -> BoundPipeline:
    """Returns `bound` with each engine's memory set, for a process that runs one engine of each stage.

    Raises ConfigError for what does not fit, before anything starts. Sets nothing on a host without cards.
    """
    measured = _measure_own_cards(bound.config.stages)
    return fit_cards(bound, measured) if measured else bound


def fit_cards(bound: BoundPipeline, measured: Mapping[int, CardMemory]) -> BoundPipeline:
    """As `fit_process`, with the cards given by number."""
    size = _smallest(measured.values())
    cards = cards_of_one_process(bound.config.stages, size - CARD_RESERVE_BYTES, _first_visible())
    plan = plan_memory(needs_of(bound, size), tuple(cards.values()))
    for number, card in cards.items():
        measured[number].refuse_too_little_free(card.name, plan.taken(card))
    return replace(bound, config=with_memory(bound.config, plan, size))


def measure_replica(stage: StageConfig) -> tuple[CardMemory, ...]:
    """The cards of a replica of one stage, in a process that sees its own cards only. Takes seconds.

    None of a replica on several hosts: its memory is what its engine_args say.
    """
    if not stage.gpus_per_replica or stage.hosts_per_replica > 1:
        return ()
    return measure_cards()[: stage.num_parts]


def fit_replica(bound: BoundPipeline, stage: StageConfig, measured: Sequence[CardMemory]) -> BoundPipeline:
    """Returns `bound` with each engine's memory set, for a replica of one stage that has the cards `measured`.

    All replicas compute the same plan, from the size of a card. Raises ConfigError for what does not fit, before this
    replica's engine starts; nothing is set where there are no cards.
    """
    if not measured:
        return bound
    size = _smallest(measured)
    plan = memory_plan(bound, size)
    for number, card in enumerate(measured):
        card.refuse_too_little_free(f"GPU {number} of {stage.model_stage}", plan.engines[stage.stage_id].total)
    return replace(bound, config=with_memory(bound.config, plan, size))


def memory_plan(bound: BoundPipeline, card_bytes: int) -> MemoryPlan:
    """The memory of all replicas in a cluster of cards of `card_bytes`. Raises ConfigError for what does not fit."""
    cards = cards_of_replicas(bound.config.stages, card_bytes - CARD_RESERVE_BYTES)
    return plan_memory(needs_of(bound, card_bytes), cards)


def needs_of(bound: BoundPipeline, card_bytes: int) -> list[EngineNeed]:
    return engine_needs(bound.config, bound.folder, lambda stage: _sizes(bound, stage), card_bytes)


def _sizes(bound: BoundPipeline, stage: StageConfig) -> StageSizes:
    """What the family says, and the adapters of the configuration."""
    spec = bound.spec(stage)
    sizes = spec.sizes(stage)
    if not (stage.lora_adapters and isinstance(sizes, ARSizes)):
        return sizes
    return replace(sizes, adapter_elements=adapter_elements(stage, spec.lora_prefixes, bound.folder))


def bind_downloaded(config: PipelineConfig) -> BoundPipeline:
    """As `bind`, but downloads nothing: ConfigError for a hub's checkpoint that is not here."""
    model = config.model
    if not model.startswith(PRESET_PREFIX) and not Path(model).expanduser().exists():
        model = _downloaded(model)
    return bind(config.model_copy(update={"model": model}))


def _downloaded(name: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model is {name!r}, which is not on this host, so its weights cannot be counted; download it first, or "
            f"name a checkpoint's folder."
        ) from error


def _smallest(cards: Iterable[CardMemory]) -> int:
    return min(card.total_bytes for card in cards)


def _measure_own_cards(stages: Sequence[StageConfig]) -> dict[int, CardMemory]:
    """The cards that the stages run on in this process, by number."""
    numbers = sorted(cards_of_one_process(stages, 0, _first_visible()))
    pinned = numbers if any(stage.gpus for stage in stages) else None
    with visible_cards(pinned):
        measured = measure_cards() if numbers else ()
    if measured and len(measured) < len(numbers):
        raise ConfigError(f"the stages need GPUs {numbers} and {len(measured)} of them are here; use fewer cards.")
    return dict(zip(numbers, measured, strict=False))


def _first_visible() -> int:
    first = os.environ.get(VARIABLE, "").split(",")[0]
    return int(first) if first.isdecimal() else 0
