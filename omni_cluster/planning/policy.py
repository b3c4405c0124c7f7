"""How many replicas each stage should have: from what replicas say, and nothing else.

`decide` is a pure function. Ray Serve asks it by `cluster/autoscaling.py`, and the simulation (`simulation.py`) with
the same rules; it knows neither clocks nor clusters.

    need     a stage's signals over what one replica of it should carry; the largest counts
    steady   up once more is needed for `up_after_s`, down to the most that was needed within `down_after_s`
    floor    never fewer than running streams need; a stage sleeps only when it has no request at all
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from omni_cluster.config.autoscaling import AutoscalingConfig
from omni_cluster.config.schema import StageConfig

ROUNDING = 1e-9
"""Of a need: 2.0000000001 replicas are two."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one replica of a stage says of itself; 0 for a signal that its stage does not have."""

    running: float = 0
    waiting: float = 0
    kv_use: float = 0
    """The part of its KV cache in use, from 0 to 1."""
    backlog_tokens: float = 0
    """Tokens that its running requests are expected to say still; for a talker, sound that is still to be spoken."""
    slack_use: float = 0
    """Players that are about to fall silent, as a part of those that it could still serve in time."""
    open_logs: float = 0
    """Requests that have not ended, here or in a stage after this one."""

    @classmethod
    def of_replica(cls, counts: Mapping[str, float], backlog_tokens: float, open_logs: int) -> Sample:
        """`counts`: what its engine says."""
        blocks, waiting = counts.get("kv_blocks", 0), max(0, counts["waiting"] - counts.get("held", 0))
        return cls(
            running=_sounding(counts, waiting) if "streams" in counts else counts["running"],
            waiting=waiting,
            kv_use=counts.get("kv_blocks_used", 0) / blocks if blocks else 0.0,
            backlog_tokens=backlog_tokens,
            slack_use=counts.get("slack_percent", 0) / 100,
            open_logs=open_logs,
        )


def _sounding(counts: Mapping[str, float], waiting: float) -> float:
    """Requests that a sound stage works on: streams for all of their time, others by their jobs. A stream has several
    jobs; all but the first of a request are held.
    """
    return max(counts["streams"], counts["running"] + counts["waiting"] - counts["held"] - waiting)


@dataclass(frozen=True, slots=True)
class StageLoad(Sample):
    """What all replicas of a stage say together: sums of their samples, and how many they are."""

    replicas: int = 0

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> StageLoad:
        there = list(samples)
        sums = {each.name: math.fsum(getattr(sample, each.name) for sample in there) for each in fields(Sample)}
        return cls(**sums, replicas=len(there))

    @classmethod
    def of_signals(cls, signals: Mapping[str, Mapping[str, float]]) -> StageLoad:
        """`signals`: by the name of a sample's field, what each replica says that has reported.

        A stage that sleeps has no replicas: Serve itself wakes it, for what it counts.
        """
        names = [each.name for each in fields(Sample)]
        there = {replica for name in names for replica in signals.get(name, {})}
        return cls.of(Sample(**{name: signals.get(name, {}).get(each, 0.0) for name in names}) for each in there)


@dataclass(frozen=True, slots=True)
class StageRule:
    """What one replica of a stage should carry, and how fast its stage follows; None: the signal does not count."""

    max_replicas: int
    min_replicas: int = 1
    """0: the stage may sleep."""
    max_streams: float = math.inf
    """Requests that one replica can hold at once: running ones never find fewer replicas than that takes."""
    max_requests: float | None = None
    """Requests that run in one replica, or wait for it."""
    max_kv_use: float | None = None
    max_backlog_tokens: float | None = None
    max_slack_use: float | None = None
    up_after_s: float = 10.0
    down_after_s: float = 300.0
    spare: float = 0.2
    """A part of each replica that must be free before the stage shrinks, so that it does not grow again at once."""

    def need(self, load: StageLoad) -> float:
        """Replicas, as a fraction, for the signal that wants the most."""
        carried = (
            (load.running + load.waiting, self.max_requests),
            (load.kv_use, self.max_kv_use),
            (load.backlog_tokens, self.max_backlog_tokens),
            (load.slack_use, self.max_slack_use),
        )
        return max((signal / most for signal, most in carried if most is not None), default=0.0)

    def floor(self, load: StageLoad) -> int:
        """Replicas that running streams need: a place for each, and room for their KV cache; one for any request."""
        least = 1 if load.open_logs else 0
        return _bounded(max(least, _whole(load.running / self.max_streams), _whole(load.kv_use)), self)


def rule_of(stage: StageConfig, scale: AutoscalingConfig) -> dict[str, float]:
    """The fields of the stage's `StageRule` that its configuration says."""
    places = stage.all_options.get("max_streams", stage.engine_args.get("max_num_seqs"))
    rule = {
        "min_replicas": scale.min_replicas,
        "max_replicas": scale.max_replicas,
        "max_streams": places,
        "up_after_s": scale.upscale_delay_s,
        "down_after_s": scale.downscale_delay_s,
        **scale.signals.model_dump(),
    }
    return {name: value for name, value in rule.items() if value is not None}


Changes = tuple[tuple[float, int], ...]
"""What a stage wanted: since when, how many; the earliest first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas of each stage, and what the next decision must know of this and earlier ones.

    Of a stage that sleeps that is nothing: Serve wakes it without a decision, and what was wanted before would
    put it to sleep again at once.
    """

    replicas: dict[str, int]
    wishes: dict[str, Changes] = field(default_factory=dict)


def decide(
    rules: Mapping[str, StageRule],
    before: Decision,
    now_s: float,
    loads: Mapping[str, StageLoad],
) -> Decision:
    """The replicas that stages should have now. `before`: the decision before this, whose replicas there are by now."""
    replicas: dict[str, int] = {}
    wishes: dict[str, Changes] = {}
    for stage, rule in rules.items():
        current, load = before.replicas[stage], loads.get(stage, StageLoad())
        floor = rule.floor(load)
        wish = max(floor, _wish(rule, load, current))
        wishes[stage] = _with_change(before.wishes.get(stage, ()), now_s, wish, max(rule.up_after_s, rule.down_after_s))
        steady = wish if current == 0 else _steady(wishes[stage], now_s, rule, current)
        replicas[stage] = max(floor, _bounded(steady, rule))
    return Decision(replicas, {stage: changes for stage, changes in wishes.items() if replicas[stage]})


def _wish(rule: StageRule, load: StageLoad, current: int) -> int:
    """What the load alone wants. It stays as it is without reports, as when all replicas start."""
    if current and not load.replicas:
        return current
    need = rule.need(load)
    most, least = _whole(need / (1 - rule.spare)), _whole(need)
    return _bounded(min(max(current, least), most), rule)


def _steady(changes: Changes, now_s: float, rule: StageRule, current: int) -> int:
    """Up to what was wanted throughout the last seconds, or down to the most that was wanted in a longer time."""
    up = _wished(changes, now_s - rule.up_after_s)
    down = _wished(changes, now_s - rule.down_after_s)
    if up and min(up) > current:
        return min(up)
    return min(current, max(down)) if down else current


def _wished(changes: Changes, since_s: float) -> list[int]:
    """All that was wanted since then; nothing where it is not known what was wanted then."""
    then = [wish for at_s, wish in changes if at_s <= since_s + ROUNDING]
    return [then[-1], *(wish for at_s, wish in changes if at_s > since_s + ROUNDING)] if then else []


def _with_change(changes: Changes, now_s: float, wish: int, kept_s: float) -> Changes:
    """With the newest wish, and without those that no window reaches any more."""
    if not changes or changes[-1][1] != wish:
        changes = (*changes, (now_s, wish))
    old = sum(at_s <= now_s - kept_s for at_s, _ in changes)
    return changes[max(0, old - 1) :]


def _bounded(replicas: int, rule: StageRule) -> int:
    return min(max(replicas, rule.min_replicas), rule.max_replicas)


def _whole(need: float) -> int:
    return math.ceil(need - ROUNDING)
