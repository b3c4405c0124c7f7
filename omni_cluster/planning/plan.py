"""How many cards a number of streams takes, how the stages share them, and what their listeners notice.

Each layout that was measured on the card is tried; the one with the fewest cards is taken, or with the most streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from omni_cluster.planning.curves import OpenLoop
from omni_cluster.planning.measured import Layout, Measured, Request
from omni_cluster.planning.policy import ROUNDING
from omni_cluster.planning.work import Pipeline, pipeline, prompt_s
from omni_cluster.types.errors import ConfigError

NEAR = 0.05
"""A load that differs from a measured one by no more is that one."""
MOST_CARDS = 10_000
SOUND_S, PROMPT_TOKENS = (0.1, 3_600.0), (1, 1_000_000)
"""Lengths that are planned for."""
LATE_PROMPTS = 0.95
"""A prompt that is longer than this part of all: its first audio is the p95's."""


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths between two bounds, as many from 2 to 4 as from 10 to 20: log-uniform, as `omni-cluster bench --mix`."""

    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.low if self.high == self.low else (self.high - self.low) / math.log(self.high / self.low)

    def at(self, part: float) -> float:
        return self.low * (self.high / self.low) ** part


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for. `streams`: players that hear sound at once; None: as many as the cards carry."""

    sound_s: Range
    prompt_tokens: Range
    streams: float | None = None
    cards: int | None = None
    cards_per_host: int = 8
    without_gap: float = 0.99
    first_audio_s: float = 1.0
    """p95."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The replicas of one stage; `shares`: the other stages on its cards."""

    name: str
    replicas: int
    gpus: float
    shares: tuple[str, ...]
    cards: tuple[int, ...] = ()
    """Those that it is pinned to, where it is said which stages meet on a card."""
    goes_last: bool = False
    """Its kernels wait for those of the stages beside it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One expected figure and how it is known."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What was chosen. `sound_cards`: those that make the sound share the rate evenly."""

    target: Target
    stages: tuple[StagePart, ...]
    cards: int
    rate_per_s: float
    most_per_s: float
    """Answers with which the target is kept still."""
    sound_cards: int
    late_s: float
    """What a long prompt adds to the first audio."""
    pipeline: Pipeline
    figures: tuple[Figure, ...]

    @property
    def layout(self) -> Layout:
        return self.pipeline.layout

    @property
    def open_loop(self) -> OpenLoop:
        return self.pipeline.open_loop

    @property
    def hosts(self) -> int:
        return math.ceil(self.cards / self.target.cards_per_host)

    @property
    def streams(self) -> float:
        return self.rate_per_s * self.target.sound_s.mean

    @property
    def most_streams(self) -> float:
        return self.most_per_s * self.target.sound_s.mean


def plan_cluster(measured: Measured, target: Target) -> ClusterPlan:
    """The fewest cards that keep the target, or without `streams` the most streams that the cards keep it with.

    Raises ConfigError where nothing keeps it, or more cards than there are would.
    """
    _check(target)
    return _Planner(measured, target).plan()


def mean_request(measured: Measured, target: Target) -> Request:
    """As long as those that are asked for are in the mean; longer sound is of more text."""
    like, sound_s = measured.card.request, target.sound_s.mean
    longer = sound_s / like.sound_s
    return Request(target.prompt_tokens.mean, like.text_tokens * longer, like.sound_tokens * longer, sound_s)


def late_s(measured: Measured, target: Target) -> float:
    """What a long prompt adds to the first audio."""
    return prompt_s(measured, target.prompt_tokens.at(LATE_PROMPTS))


def noticed(measured: Measured, target: Target, pipeline: Pipeline, each_per_s: float) -> tuple[float, float, float]:
    """The part without a gap, first audio p50 and p95, by the requests a second for each card that makes sound."""
    curves, usual_s = pipeline.open_loop, prompt_s(measured, target.prompt_tokens.at(0.5))
    return (
        curves.without_gap.at(each_per_s),
        curves.first_audio_p50_s.at(each_per_s) + usual_s,
        curves.first_audio_p95_s.at(each_per_s) + late_s(measured, target),
    )


def _check(target: Target) -> None:
    for option, lengths, (least, most) in (
        ("--mix-sound", target.sound_s, SOUND_S),
        ("--mix-prompt", target.prompt_tokens, PROMPT_TOKENS),
    ):
        if not least <= lengths.low <= lengths.high <= most:
            raise ConfigError(f"{option} is {lengths.low} {lengths.high}; use two numbers from {least:g} to {most:g}.")
    if (target.cards or 0) > MOST_CARDS:
        raise ConfigError(f"--cards is {target.cards}; use a number up to {MOST_CARDS}.")


@dataclass(frozen=True, slots=True)
class _Choice:
    """Cards in one layout: `fronts` replicas of each stage before the sound, and cards that make it."""

    pipeline: Pipeline
    sound_per_s: float
    """What a card of these carries within the target."""
    fronts: int
    sound: int

    @property
    def cards(self) -> int:
        return self.fronts * self.pipeline.front_cards + self.sound

    @property
    def most_per_s(self) -> float:
        sound_per_s = self.sound * self.sound_per_s
        return min(self.fronts * self.pipeline.codes.carries_per_s, sound_per_s) if self.fronts else sound_per_s

    @property
    def never_resting_per_s(self) -> tuple[float, float]:
        """Answers of the stages before the sound, and of those that make it."""
        stages = self.pipeline
        return self.replicas(stages.codes.name) * stages.codes.most_per_s, self.sound * stages.sound.most_per_s

    def replicas(self, name: str) -> int:
        return self.sound if name == self.pipeline.sound.name or not self.fronts else self.fronts


class _Planner:
    def __init__(self, measured: Measured, target: Target) -> None:
        self._measured, self._target = measured, target
        self._late_s = late_s(measured, target)
        self._pipelines = [pipeline(measured, layout, mean_request(measured, target)) for layout in measured.layouts]

    def plan(self) -> ClusterPlan:
        streams, cards = self._target.streams, self._target.cards
        if not any(self._sound_per_s(each) for each in self._pipelines):
            raise ConfigError(self._out_of_reach())
        if streams is None:
            best = self._best(cards or 1)
            return self._made(best, best.most_per_s)
        rate_per_s = streams / self._target.sound_s.mean
        fewest = self._fewest(rate_per_s)
        if fewest.cards > MOST_CARDS:
            raise ConfigError(f"--streams is {streams:g}; that takes more than {MOST_CARDS} cards, ask for fewer.")
        if cards is not None and fewest.cards > cards:
            most = math.floor(self._best(cards).most_per_s * self._target.sound_s.mean)
            raise ConfigError(f"--cards is {cards}; {streams:g} streams need {fewest.cards}, or use --streams {most}.")
        return self._made(fewest, rate_per_s)

    def _sound_per_s(self, pipeline: Pipeline) -> float:
        return pipeline.open_loop.carried_per_s(self._target.without_gap, self._target.first_audio_s - self._late_s)

    def _fewest(self, rate_per_s: float) -> _Choice:
        """With as many cards, the one that carries more."""
        return min(self._choices(lambda each: [_for_rate(each, self._sound_per_s(each), rate_per_s)]), key=_cost)

    def _best(self, cards: int) -> _Choice:
        """Raises ConfigError for fewer cards than each layout that was measured takes."""
        there = self._choices(lambda each: _of_cards(each, self._sound_per_s(each), cards))
        if not there:
            least = min(each.front_cards + 1 for each in self._pipelines if self._sound_per_s(each))
            name = self._measured.card.name
            raise ConfigError(
                f"--cards is {cards}; no layout of so few {name} was measured to do it, use --cards {least}."
            )
        return max(there, key=lambda choice: choice.most_per_s)

    def _choices(self, made: Callable[[Pipeline], list[_Choice]]) -> list[_Choice]:
        return [choice for each in self._pipelines if self._sound_per_s(each) for choice in made(each)]

    def _made(self, choice: _Choice, rate_per_s: float) -> ClusterPlan:
        return ClusterPlan(
            target=self._target,
            stages=tuple(self._part(choice, stage.name) for stage in choice.pipeline.stages),
            cards=choice.cards,
            rate_per_s=rate_per_s,
            most_per_s=choice.most_per_s,
            sound_cards=choice.sound,
            late_s=self._late_s,
            pipeline=choice.pipeline,
            figures=self._figures(choice, rate_per_s / choice.sound),
        )

    def _part(self, choice: _Choice, name: str) -> StagePart:
        gpus = self._measured.gpus[choice.pipeline.layout]
        others = tuple(other for other in gpus if other != name and gpus[other] < 1) if gpus[name] < 1 else ()
        is_first = name == choice.pipeline.text.name
        pinned = (0 if others else 1,) if (choice.fronts, choice.cards) == (1, 2) else ()
        return StagePart(name, choice.replicas(name), gpus[name], others, pinned, is_first and bool(others))

    def _figures(self, choice: _Choice, each_per_s: float) -> tuple[Figure, ...]:
        source = self._source(choice, each_per_s)
        without_gap, p50_s, p95_s = noticed(self._measured, self._target, choice.pipeline, each_per_s)
        front_per_s, sound_per_s = choice.never_resting_per_s
        fullest = self._measured.card.fullest(choice.pipeline.layout)
        last = fullest if front_per_s >= sound_per_s else self._measured.fronts[choice.pipeline.layout]
        return (
            Figure("streams without a gap", f"{100 * without_gap:.1f} %", source),
            Figure("first audio p50 / p95", f"{p50_s:.2f} / {p95_s:.2f} s", source),
            Figure("answers/s at most, with gaps", f"{min(front_per_s, sound_per_s):.1f}", f"fitted: {last.source}"),
        )

    def _source(self, choice: _Choice, each_per_s: float) -> str:
        cells = [cell for cell in self._measured.card.chosen(choice.pipeline.layout) if cell.arrivals == "open"]
        files = ", ".join(dict.fromkeys(cell.source for cell in cells))
        like, target = self._measured.card.request, self._target
        if target.sound_s != Range(like.sound_s, like.sound_s) or self._late_s:
            return f"modelled: {files}, and what lengths cost"
        if any(cell.is_played for cell in cells):
            return f"modelled: the sound stage alone, the others played: {files}"
        if any(cell.sound_cards != choice.sound for cell in cells):
            return f"modelled: each card that makes sound as in {files}"
        if any(abs(each_per_s / cell.each_per_s - 1) <= NEAR for cell in cells):
            return f"measured: {files}"
        return f"interpolated: {files}"

    def _out_of_reach(self) -> str:
        least_s = min(each.open_loop.first_audio_p95_s.at(0) for each in self._pipelines)
        return (
            f"--first-audio is {self._target.first_audio_s:g}; no card was measured to give that at p95 with such "
            f"prompts, use at least {math.ceil(100 * (least_s + self._late_s)) / 100:g}."
        )


def _for_rate(pipeline: Pipeline, sound_per_s: float, rate_per_s: float) -> _Choice:
    fronts = _whole(rate_per_s / pipeline.codes.carries_per_s) if pipeline.front_cards else 0
    return _Choice(pipeline, sound_per_s, fronts, _whole(rate_per_s / sound_per_s))


def _of_cards(pipeline: Pipeline, sound_per_s: float, cards: int) -> list[_Choice]:
    """All ways to part so many cards; each stage has one at least."""
    if not pipeline.front_cards:
        return [_Choice(pipeline, sound_per_s, 0, cards)]
    fronts = range(1, (cards - 1) // pipeline.front_cards + 1)
    return [_Choice(pipeline, sound_per_s, each, cards - each * pipeline.front_cards) for each in fronts]


def _whole(need: float) -> int:
    return math.ceil(need - ROUNDING)


def _cost(choice: _Choice) -> tuple[int, float]:
    return choice.cards, -choice.most_per_s
