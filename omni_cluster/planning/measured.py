"""What was measured of a family's stages on cards: its `measured.json`, with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from omni_cluster.models.registry import family_class, measured_file
from omni_cluster.types.errors import ConfigError

Layout = Literal["together", "pair", "apart"]
"""All stages on each card; the first two on one and the sound on others; each stage on cards of its own."""
LAYOUTS: tuple[Layout, ...] = ("together", "pair", "apart")


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured load. `level`: requests a second of an open loop, else requests at once.

    `use`: whether the figures of plans are fitted to it, or only checked against it.
    """

    layouts: tuple[Layout, ...]
    """More than one: the sound stage alone, with the others played."""
    arrivals: Literal["open", "closed", "burst"]
    level: float
    answers_per_s: float | None
    first_audio_p50_s: float
    first_audio_p95_s: float
    without_gap: float
    use: Literal["fit", "check"]
    source: str
    run: str
    """What the lines of this run have in its source."""
    sound_cards: int = 1
    prompt_tokens: tuple[float, float] | None = None
    """Bounds of the lengths, where they are not the card's `request`."""
    sound_s: tuple[float, float] | None = None

    @property
    def each_per_s(self) -> float:
        """Requests of an open loop for each card that makes sound."""
        return self.level / self.sound_cards

    @property
    def is_alone(self) -> bool:
        return self.arrivals == "burst" and self.level == 1

    @property
    def is_played(self) -> bool:
        return len(self.layouts) > 1


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each request of the cells was."""

    prompt_tokens: float
    text_tokens: float
    sound_tokens: float
    sound_s: float


class Sourced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure and where it is from."""

    value: float
    source: str


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First audio of one request alone, by the length of its prompt."""

    prompt_tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica of each stage before the sound: answers a second that they were measured to carry, and to end at."""

    carries_per_s: float
    most_per_s: float
    text_s: float
    """Of a request, in the first stage, while others are there too."""
    codes_s: float
    prompt_tokens: float
    source: str
    what: str


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of card and its cells."""

    name: str
    request: Request
    cells: tuple[Cell, ...]

    def chosen(self, layout: Layout) -> list[Cell]:
        """Cells that plans are fitted to, by their load."""
        fitted = [cell for cell in self.cells if layout in cell.layouts and cell.use == "fit"]
        return sorted(fitted, key=lambda cell: cell.each_per_s)

    def fullest(self, layout: Layout) -> Cell:
        """The cell with the most answers a second of a card that makes sound."""
        return max(self.chosen(layout), key=lambda cell: (cell.answers_per_s or 0) / cell.sound_cards)

    def most_per_s(self, layout: Layout) -> float:
        """Answers of such a card that never rests."""
        cell = self.fullest(layout)
        return (cell.answers_per_s or 0) / cell.sound_cards


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it; `gpus`: of each stage in each layout, as Ray counts them."""

    what: str
    dimensions: str
    usual_card: str
    start_s: Sourced
    first_audio_by_prompt: Prompts
    fronts: Mapping[Layout, Front]
    gpus: Mapping[Layout, Mapping[str, float]]
    cards: Mapping[str, Card]
    makers: Mapping[str, str] = {}
    """Which stage makes what, as the family says."""

    @property
    def card(self) -> Card:
        return self.cards[self.usual_card]

    @property
    def layouts(self) -> list[Layout]:
        """Those that were measured on this card."""
        return [layout for layout in LAYOUTS if self.card.chosen(layout)]


def measured_of(family: str, card: str | None = None) -> Measured:
    """Of this kind of card, or of the one that the family's file names.

    Raises ConfigError for a family or a card of which nothing was measured.
    """
    path: Path = measured_file(family)
    if not path.is_file():
        raise ConfigError(f"family is {family!r}, of which nothing was measured; use one with a measured.json.")
    measured = msgspec.json.decode(path.read_bytes(), type=Measured)
    usual = card or measured.usual_card
    if usual not in measured.cards:
        raise ConfigError(f"--card is {usual}, of which nothing was measured; use one of {', '.join(measured.cards)}.")
    return msgspec.structs.replace(measured, usual_card=usual, makers=family_class(family).makers())
