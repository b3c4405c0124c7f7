"""A day of a cluster whose replicas follow the load by `policy.decide`: seeded, second by second.

Work is a fluid: requests of a second flow through the stages together, each stage makes at most what its replicas can,
and what is left waits. Replicas of a stage are alike and share the load evenly, so the policy sees their sums, as it
does on a cluster, and a thousand of them take no longer than one. What clients notice at some load of a card is what
was measured at that load (`OpenLoop`); beyond the last measured one the line is drawn on, and what waits comes on top.
Not simulated: single requests, their lengths, routing, and the time in which a replica that goes ends its streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_cluster.planning.policy import Decision, StageLoad, StageRule, decide
from omni_cluster.planning.work import Pipeline, StageWork

DAY_S = 86_400
POLICY_EVERY_S = 10
"""How often replicas report by default, and the policy is asked here."""
LATELY_S = 10
QUIET = 0.15
"""The load at night, as a part of the peak's."""
BURST_S, BURST_FACTOR = 600, 2.0
"""Of a burst: how long, and its rate over that of the day's curve; never more than the peak."""


@dataclass(frozen=True, slots=True)
class DayFigures:
    """What clients noticed, and what it took."""

    answers: int
    peak_streams: float
    without_gap: float
    first_audio_p50_s: float
    first_audio_p95_s: float
    gpu_hours: float
    fixed_gpu_hours: float
    """With as many replicas as there may be, all day."""
    below_need: int
    """Decisions by which a stage should have fewer replicas than its running streams need: 0."""


def day_rates(peak_per_s: float, bursts: int = 0, seed: int = 0, seconds: int = DAY_S) -> NDArray[np.float64]:
    """Requests a second: quiet at night, the peak at noon, and bursts at times that are drawn; never above the peak."""
    phase = np.arange(seconds) / seconds
    rates = peak_per_s * (QUIET + (1 - QUIET) * np.sin(np.pi * phase) ** 2)
    for start in np.random.default_rng([seed, 1]).integers(0, max(1, seconds - BURST_S), bursts):
        rates[start : start + BURST_S] *= BURST_FACTOR
    return np.minimum(rates, peak_per_s)


@dataclass(slots=True)
class _Stage:
    """Replicas of one stage: those that are ready, and when those that start will be."""

    work: StageWork
    ready: int
    starting: list[float] = field(default_factory=list)
    waiting: float = 0.0
    flow_per_s: float = 0.0
    arrived_per_s: float = 0.0
    """Lately: what was measured at a rate has the chance of single seconds in it already."""

    @property
    def replicas(self) -> int:
        return self.ready + len(self.starting)

    def scale(self, wanted: int, ready_at_s: float) -> None:
        """Replicas that start are the first to go."""
        while self.replicas > wanted and self.starting:
            self.starting.pop()
        self.ready = min(self.ready, wanted)
        self.starting += [ready_at_s] * (wanted - self.replicas)

    def become_ready(self, now_s: float) -> None:
        still = [at_s for at_s in self.starting if at_s > now_s]
        self.ready += len(self.starting) - len(still)
        self.starting = still

    def flow(self, requests: float) -> float:
        """Takes a second's requests; gives how many leave."""
        self.arrived_per_s += (requests - self.arrived_per_s) / LATELY_S
        leaving = min(self.waiting + requests, self.work.most_per_s * self.ready)
        self.waiting += requests - leaving
        self.flow_per_s = leaving
        return leaving

    @property
    def running(self) -> float:
        """As many as there are by Little's law; they and no others are in the engines."""
        return self.flow_per_s * self.work.residence_s

    @property
    def wait_s(self) -> float:
        return self.waiting / (self.work.most_per_s * max(1, self.ready))

    @property
    def load(self) -> StageLoad:
        """What its replicas would report."""
        asked = self.arrived_per_s + self.waiting
        return StageLoad(
            replicas=self.ready,
            running=self.running,
            waiting=self.waiting,
            backlog_tokens=(self.running / 2 + self.waiting) * self.work.tokens,
            slack_use=asked / self.work.carries_per_s,
        )


def simulate(
    pipeline: Pipeline,
    rules: dict[str, StageRule],
    rates: Sequence[float] | NDArray[np.float64],
    start_s: float,
    seed: int = 0,
    follows: bool = True,
) -> DayFigures:
    """The figures of a load that comes by these rates, one a second. `follows`: else all replicas are there always."""
    arrivals = np.random.default_rng([seed, 0]).poisson(rates).astype(float)
    stages = [_Stage(work, _at_start(rules[work.name], work, rates[0], follows)) for work in pipeline.stages]
    decision = Decision({stage.work.name: stage.replicas for stage in stages})
    seen, gpu_s, below_need = np.zeros((len(arrivals), 3)), 0.0, 0
    for now_s, requests in enumerate(arrivals):
        for stage in stages:
            stage.become_ready(now_s)
            requests = stage.flow(requests)
        seen[now_s] = _noticed(pipeline, stages)
        gpu_s += sum(stage.replicas * stage.work.gpus for stage in stages)
        if follows and now_s % POLICY_EVERY_S == 0:
            loads = {stage.work.name: stage.load for stage in stages}
            decision = decide(rules, decision, now_s, loads)
            below_need += any(decision.replicas[name] < rules[name].floor(load) for name, load in loads.items())
            for stage in stages:
                stage.scale(decision.replicas[stage.work.name], now_s + start_s)
    return _figures(pipeline, rules, rates, arrivals, seen, gpu_s, below_need)


def _at_start(rule: StageRule, work: StageWork, rate_per_s: float, follows: bool) -> int:
    wanted = math.ceil(rate_per_s / work.carries_per_s) if follows else rule.max_replicas
    return min(max(wanted, rule.min_replicas), rule.max_replicas)


def _noticed(pipeline: Pipeline, stages: Sequence[_Stage]) -> tuple[float, float, float]:
    """Of requests that come now: the part without a gap, first audio p50 and p95."""
    sound, curves = stages[-1], pipeline.open_loop
    each_per_s = (sound.arrived_per_s + sound.waiting) / max(1, sound.ready)
    wait_s = sum(stage.wait_s for stage in stages)
    share = min(1.0, max(0.0, curves.without_gap.at(each_per_s)))
    measured_to = min(each_per_s, curves.first_audio_p50_s.end)
    return (
        share,
        curves.first_audio_p50_s.at(measured_to) + wait_s,
        curves.first_audio_p95_s.at(measured_to) + wait_s,
    )


def _figures(
    pipeline: Pipeline,
    rules: dict[str, StageRule],
    rates: Sequence[float] | NDArray[np.float64],
    arrivals: NDArray[np.float64],
    seen: NDArray[np.float64],
    gpu_s: float,
    below_need: int,
) -> DayFigures:
    total = arrivals.sum()
    whole_s = sum(rules[work.name].max_replicas * work.gpus for work in pipeline.stages) * len(arrivals)
    p50, p95 = _quantiles(arrivals, seen[:, 1], seen[:, 2])
    return DayFigures(
        answers=int(total),
        peak_streams=float(max(rates)) * pipeline.sound_s,
        without_gap=float((arrivals * seen[:, 0]).sum() / max(1.0, total)),
        first_audio_p50_s=p50,
        first_audio_p95_s=p95,
        gpu_hours=gpu_s / 3600,
        fixed_gpu_hours=whole_s / 3600,
        below_need=below_need,
    )


def _quantiles(weights: NDArray[np.float64], p50: NDArray[np.float64], p95: NDArray[np.float64]) -> tuple[float, float]:
    """Of all requests together, where those of each second lie on a straight line through their p50 and p95."""
    places = (np.arange(20) + 0.5) / 20
    values = p50[:, None] + (p95 - p50)[:, None] * (places - 0.5) / 0.45
    order = np.argsort(values, axis=None)
    summed = np.cumsum(np.repeat(weights, len(places))[order])
    found = np.searchsorted(summed, np.array([0.5, 0.95]) * summed[-1])
    at50, at95 = values.reshape(-1)[order][found]
    return float(at50), float(at95)
