"""Stages that share a card: how many engines of which stages a card has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from omni_cluster.config.schema import StageConfig

Engines = dict[int, int]
"""How many engines a card has of each stage, by its id."""


def on_pinned_cards(stages: Sequence[StageConfig]) -> dict[int, Engines]:
    """The engines of a cluster on cards that stages name, by the card's number: all replicas of such a stage."""
    return _by_card((number, stage.stage_id, stage.max_replicas) for stage in stages for number in stage.gpus or ())


def on_cards_of_one_process(stages: Sequence[StageConfig], first: int) -> dict[int, Engines]:
    """Those of a process that runs one engine of each stage: without `gpus` from card number `first` on."""
    return _by_card(
        (number, stage.stage_id, 1)
        for stage in stages
        if stage.gpus_per_replica > 0
        for number in stage.gpus or range(first, first + stage.num_parts)
    )


def with_cards_alone(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Stages each of whose replicas has whole cards for itself, which Ray chooses."""
    return [stage for stage in stages if stage.scheduled_gpus >= 1]


def by_fractions(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Stages each of whose replicas has a part of a card, which Ray chooses."""
    return [stage for stage in stages if 0 < stage.scheduled_gpus < 1]


def fit_one_card(sharing: Sequence[StageConfig]) -> bool:
    """Whether all replicas may meet on one card: where their parts come to more, Ray decides which replicas meet."""
    # fsum rounds once: shares that add up to 1 do so here too.
    return math.fsum(stage.scheduled_gpus * stage.max_replicas for stage in sharing) <= 1


def all_share_a_card(stages: Sequence[StageConfig]) -> bool:
    """Whether one card has an engine of every stage that has cards, and of two stages at least."""
    on_cards = [stage for stage in stages if stage.gpus_per_replica > 0]
    by_parts = by_fractions(on_cards) == on_cards and fit_one_card(on_cards)
    pinned = any(len(engines) == len(on_cards) for engines in on_pinned_cards(on_cards).values())
    return len(on_cards) > 1 and (by_parts or pinned)


def _by_card(placed: Iterable[tuple[int, int, int]]) -> dict[int, Engines]:
    """From card, stage and count."""
    cards: dict[int, Engines] = {}
    for number, stage_id, count in placed:
        cards.setdefault(number, {})[stage_id] = count
    return dict(sorted(cards.items()))
