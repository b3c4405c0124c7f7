"""How many cards a number of streams takes, how the stages share them, and what their listeners notice.

One card has all stages, as it was measured. From two cards on the sound stage has cards of its own, for beside the
others its work takes 1.6 times as long; the others share the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omni_cluster.planning.curves import AnswerTime, OpenLoop
from omni_cluster.planning.measured import Layout, Measured, Request
from omni_cluster.planning.work import Pipeline, apart, prompt_s, together
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
    layout: Layout
    stages: tuple[StagePart, ...]
    cards: int
    rate_per_s: float
    most_per_s: float
    """Answers with which the target is kept still."""
    sound_cards: int
    late_s: float
    """What a long prompt adds to the first audio."""
    open_loop: OpenLoop
    pipeline: Pipeline
    figures: tuple[Figure, ...]

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


def _check(target: Target) -> None:
    for option, lengths, (least, most) in (
        ("--mix-sound", target.sound_s, SOUND_S),
        ("--mix-prompt", target.prompt_tokens, PROMPT_TOKENS),
    ):
        if not least <= lengths.low <= lengths.high <= most:
            raise ConfigError(f"{option} is {lengths.low} {lengths.high}; use two numbers from {least:g} to {most:g}.")
    if (target.cards or 0) > MOST_CARDS:
        raise ConfigError(f"--cards is {target.cards}; use a number up to {MOST_CARDS}.")


class _Planner:
    def __init__(self, measured: Measured, target: Target) -> None:
        self._measured, self._target = measured, target
        like, sound_s = measured.request, target.sound_s.mean
        longer = sound_s / like.sound_s
        request = Request(target.prompt_tokens.mean, like.text_tokens * longer, like.sound_tokens * longer, sound_s)
        self._pipeline, self._together = apart(measured, request), together(measured, request)
        self._late_s = prompt_s(measured, target.prompt_tokens.at(LATE_PROMPTS))
        self._usual_s = prompt_s(measured, target.prompt_tokens.at(0.5))
        self._one_per_s, self._sound_per_s = self._carried(self._together), self._carried(self._pipeline.open_loop)
        self._front_per_s = self._pipeline.codes.carries_per_s

    def _carried(self, open_loop: OpenLoop) -> float:
        return open_loop.carried_per_s(self._target.without_gap, self._target.first_audio_s - self._late_s)

    def plan(self) -> ClusterPlan:
        if not max(self._one_per_s, self._sound_per_s):
            raise ConfigError(self._out_of_reach())
        streams, cards = self._target.streams, self._target.cards
        if streams is None:
            front, sound = self._best(cards or 1)
            return self._made(front, sound, self._most_per_s(front, sound))
        rate_per_s = streams / self._target.sound_s.mean
        front, sound = self._fewest(rate_per_s)
        if front + sound > MOST_CARDS:
            raise ConfigError(f"--streams is {streams:g}; that takes more than {MOST_CARDS} cards, ask for fewer.")
        if cards is not None and front + sound > cards:
            most = math.floor(self._most_per_s(*self._best(cards)) * self._target.sound_s.mean)
            raise ConfigError(f"--cards is {cards}; {streams:g} streams need {front + sound}, or use --streams {most}.")
        return self._made(front, sound, rate_per_s)

    def _fewest(self, rate_per_s: float) -> tuple[int, int]:
        """Cards of the first stages and of the sound; one card alone is a sound card with all stages."""
        if rate_per_s <= self._one_per_s:
            return 0, 1
        if not self._sound_per_s:
            return 0, math.ceil(rate_per_s / self._one_per_s)
        return math.ceil(rate_per_s / self._front_per_s), math.ceil(rate_per_s / self._sound_per_s)

    def _best(self, cards: int) -> tuple[int, int]:
        splits = [(front, cards - front) for front in range(1, cards)] if self._sound_per_s else []
        return max(splits, key=lambda split: self._most_per_s(*split), default=(0, cards))

    def _most_per_s(self, front: int, sound: int) -> float:
        return min(front * self._front_per_s, sound * self._sound_per_s) if front else sound * self._one_per_s

    def _made(self, front: int, sound: int, rate_per_s: float) -> ClusterPlan:
        layout: Layout = "apart" if front else "together"
        open_loop = self._pipeline.open_loop if front else self._together
        sound_stage = self._measured.makers["sound"]
        replicas = {name: sound if name == sound_stage else front or sound for name in self._measured.gpus[layout]}
        return ClusterPlan(
            target=self._target,
            layout=layout,
            stages=tuple(self._part(layout, name, count) for name, count in replicas.items()),
            cards=front + sound,
            rate_per_s=rate_per_s,
            most_per_s=self._most_per_s(front, sound),
            sound_cards=sound,
            late_s=self._late_s,
            open_loop=open_loop,
            pipeline=self._pipeline,
            figures=self._figures(layout, open_loop, rate_per_s / sound, replicas),
        )

    def _part(self, layout: Layout, name: str, replicas: int) -> StagePart:
        gpus = self._measured.gpus[layout]
        others = tuple(other for other in gpus if other != name and gpus[other] < 1) if gpus[name] < 1 else ()
        return StagePart(name, replicas, gpus[name], others)

    def _figures(
        self, layout: Layout, open_loop: OpenLoop, each_per_s: float, replicas: Mapping[str, int]
    ) -> tuple[Figure, ...]:
        source = self._source(layout, each_per_s)
        p50_s = open_loop.first_audio_p50_s.at(each_per_s) + self._usual_s
        p95_s = open_loop.first_audio_p95_s.at(each_per_s) + self._late_s
        return (
            Figure("streams without a gap", f"{100 * open_loop.without_gap.at(each_per_s):.1f} %", source),
            Figure("first audio p50 / p95", f"{p50_s:.2f} / {p95_s:.2f} s", source),
            Figure(
                "answers/s at most, with gaps",
                f"{self._never_resting_per_s(replicas, layout):.1f}",
                self._most_source(layout),
            ),
        )

    def _never_resting_per_s(self, replicas: Mapping[str, int], layout: Layout) -> float:
        """Answers of the stage that makes the fewest."""
        if layout == "apart":
            return min(replicas[stage.name] * stage.most_per_s for stage in self._pipeline.stages)
        longer = self._target.sound_s.mean / self._measured.request.sound_s
        return replicas[self._pipeline.sound.name] / (AnswerTime.fitted(self._measured).work_s * longer)

    def _source(self, layout: Layout, each_per_s: float) -> str:
        cells = self._measured.chosen(layout, "steps", is_open=True)
        files = ", ".join(dict.fromkeys(cell.source for cell in cells))
        if layout == "apart":
            return f"modelled: the sound stage alone, the others played ({files}), and their cost"
        like, target = self._measured.request, self._target
        is_like = target.sound_s == Range(like.sound_s, like.sound_s) and not self._late_s
        if is_like and any(abs(each_per_s / cell.level - 1) <= NEAR for cell in cells):
            return f"measured: {files}"
        return f"interpolated: {files}"

    def _most_source(self, layout: Layout) -> str:
        cells = self._measured.chosen("together", "steps")
        return f"fitted: {cells[-1].source}" + (" and slowdown by neighbours" if layout == "apart" else "")

    def _out_of_reach(self) -> str:
        least_s = min(curve.first_audio_p95_s.at(0) for curve in (self._together, self._pipeline.open_loop))
        return (
            f"--first-audio is {self._target.first_audio_s:g}; no card was measured to give that at p95 with such "
            f"prompts, use at least {math.ceil(100 * (least_s + self._late_s)) / 100:g}."
        )
