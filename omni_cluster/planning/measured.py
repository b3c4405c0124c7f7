"""What was measured of a family's stages on cards: its `measured.json`, with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from omni_cluster.models.registry import family_class, measured_file
from omni_cluster.types.errors import ConfigError

Layout = Literal["together", "split", "apart"]
"""All stages on each card; the first over two cards, with the sound stage beside it on one; the sound stage alone."""


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured load. `level`: requests a second of an open loop, else requests at once.

    `use`: whether the figures of plans are fitted to it, or only checked against it.
    """

    layout: Layout
    version: str
    arrivals: Literal["open", "closed", "burst"]
    level: float
    answers_per_s: float | None
    first_audio_p50_s: float
    first_audio_p95_s: float | None
    without_gap: float | None
    use: Literal["fit", "check"]
    source: str


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


class Slowdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much longer the sound stage's work takes beside the stages that share its card."""

    together: float
    split: float
    apart: float
    source: str

    def of(self, layout: Layout) -> float:
        return {"together": self.together, "split": self.split, "apart": self.apart}[layout]


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stages before the sound on one card: a token of `at_once` requests in each of them."""

    token_s: float
    sound_token_s: float
    at_once: float
    beside: float
    """How much longer the second's token takes beside the first."""
    busy: float
    """The part of its time in which such a card should be at work."""
    source: str

    def answers_per_s(self, request: Request, prompt_s: float) -> float:
        """What the card carries of such requests, each with so many seconds for its prompt."""
        text_s = request.text_tokens * self.token_s / self.at_once
        sound_s = request.sound_tokens * self.sound_token_s * self.beside / self.at_once
        return self.busy / (text_s + sound_s + prompt_s)


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it; `gpus`: of each stage in each layout, as Ray counts them."""

    what: str
    card: str
    dimensions: str
    request: Request
    start_s: Sourced
    first_audio_by_prompt: Prompts
    slowdown: Slowdown
    front: Front
    gpus: Mapping[str, Mapping[str, float]]
    cells: tuple[Cell, ...]
    makers: Mapping[str, str] = {}
    """Which stage makes what, as the family says."""

    def chosen(self, layout: Layout, version: str, use: str = "fit", is_open: bool = False) -> list[Cell]:
        """Cells by level."""
        there = [
            cell
            for cell in self.cells
            if (cell.layout, cell.version, cell.use, cell.arrivals == "open") == (layout, version, use, is_open)
        ]
        return sorted(there, key=lambda cell: cell.level)


def measured_of(family: str) -> Measured:
    """Raises ConfigError for a family of which nothing was measured."""
    path: Path = measured_file(family)
    if not path.is_file():
        raise ConfigError(f"family is {family!r}, of which nothing was measured; use one with a measured.json.")
    measured = msgspec.json.decode(path.read_bytes(), type=Measured)
    return msgspec.structs.replace(measured, makers=family_class(family).makers())
