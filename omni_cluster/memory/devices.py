"""Cards: what one has, and how many engines of which stages run on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.sharing import (
    by_fractions,
    fit_one_card,
    on_cards_of_one_process,
    on_pinned_cards,
    with_cards_alone,
)
from omni_cluster.memory.sizes import GIB, gib
from omni_cluster.types.errors import ConfigError

CARD_RESERVE_BYTES = 1 * GIB
"""The part of a card that no stage gets: the driver's, which counts as taken on an idle card too."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """One card, as the driver sees it now."""

    total_bytes: int
    free_bytes: int

    def refuse_too_little_free(self, name: str, needed: int) -> None:
        """Raises ConfigError where fewer than `needed` bytes of the card, called `name`, are free."""
        if needed > self.free_bytes:
            raise ConfigError(
                f"{name} has {gib(self.free_bytes)} of {gib(self.total_bytes)} GiB free and {gib(needed)} are needed; "
                f"end what else runs there, or use another card."
            )


@dataclass(frozen=True, slots=True)
class Card:
    """`usable` bytes, and how many engines of which stages run there."""

    name: str
    usable: int
    engines: Mapping[int, int]


def cards_of_replicas(stages: Sequence[StageConfig], usable: int) -> tuple[Card, ...]:
    """The cards of a cluster whose cards have `usable` bytes each.

    A pinned card has all replicas of the stages that name it. Shares that come to at most one card may all meet there;
    where they come to more, Ray decides which replicas meet, and a replica may take no more than its share of a card.
    """
    cards = [Card(f"GPU {number}", usable, engines) for number, engines in on_pinned_cards(stages).items()]
    whole = with_cards_alone(stages)
    cards += [Card(f"each card of {stage.model_stage}", usable, {stage.stage_id: 1}) for stage in whole]
    return (*cards, *_fractional_cards(by_fractions(stages), usable))


def _fractional_cards(stages: Sequence[StageConfig], usable: int) -> Iterator[Card]:
    if not stages:
        return
    if fit_one_card(stages):
        yield Card("the shared card", usable, {stage.stage_id: stage.max_replicas for stage in stages})
        return
    for stage in stages:
        share = math.floor(usable * stage.scheduled_gpus)
        yield Card(f"{stage.scheduled_gpus:g} of a card", share, {stage.stage_id: 1})


def cards_of_one_process(stages: Sequence[StageConfig], usable: int, first: int = 0) -> dict[int, Card]:
    """The cards, by number, of a process that runs one engine of each stage: without `gpus` from number `first` on."""
    return {
        number: Card(f"GPU {number}", usable, engines)
        for number, engines in on_cards_of_one_process(stages, first).items()
    }
