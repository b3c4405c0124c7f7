"""What one replica of a stage counts of its requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry

from omni_cluster.engine import metric_definitions as define
from omni_cluster.types.inputs import NOTHING_KNOWN, KnownOutput
from omni_cluster.types.outputs import StageChunk

Outcome = Literal["finished", "failed", "cancelled"]

NEWEST: Final = 0.05
"""The weight of the request that finished last in what a request usually makes."""


class StageMetrics:
    """The metrics of one replica, in a registry of their own: a process may have others, vLLM's for one."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ended = define.REQUESTS.counter(registry)
        self._ended = {outcome: ended.labels(outcome) for outcome in get_args(Outcome)}  # all there from the start
        self._running = define.RUNNING.gauge(registry)
        self._waiting = define.WAITING.gauge(registry)
        self._held = define.HELD.gauge(registry)
        self._held_bytes = define.HELD_BYTES.gauge(registry)
        self._open_logs = define.OPEN_LOGS.gauge(registry)
        self.first_output = define.FIRST_OUTPUT.histogram(registry)
        self.request = define.REQUEST.histogram(registry)
        self.handover = define.HANDOVER.histogram(registry)
        self.tokens = define.TOKENS.counter(registry)
        self.cached_tokens = define.CACHED_TOKENS.counter(registry)
        self.samples = define.SAMPLES.counter(registry)
        self.pieces = define.PIECES.counter(registry)
        self._open: set[RequestMeter] = set()
        self._usual_tokens = 0.0

    @property
    def backlog_tokens(self) -> float:
        """Tokens that open requests are expected to make still, if each makes as many as those that finished lately."""
        return sum(max(0.0, self._usual_tokens - meter.tokens) for meter in self._open)

    def begin(self, known: KnownOutput = NOTHING_KNOWN) -> RequestMeter:
        """For a request that comes now; `known`: what it says again, which was counted where it was made."""
        meter = RequestMeter(self, known.made)
        self._open.add(meter)
        return meter

    def ended(self, meter: RequestMeter, outcome: Outcome) -> None:
        self._ended[outcome].inc()
        self._open.discard(meter)
        if outcome == "finished":
            weight = NEWEST if self._usual_tokens else 1.0
            self._usual_tokens += weight * (meter.tokens - self._usual_tokens)

    def hold(self, counts: Mapping[str, int], open_logs: int, held_bytes: int = 0) -> None:
        """What the replica holds now; `counts`: what its engine says. One without rows to wait for holds no request."""
        self._running.set(counts["running"])
        self._waiting.set(counts["waiting"])
        self._held.set(counts.get("held", 0))
        self._open_logs.set(open_logs)
        self._held_bytes.set(held_bytes)


class RequestMeter:
    """One request in one stage: counts its output as it is made, and its end once."""

    def __init__(self, metrics: StageMetrics, known_tokens: int) -> None:
        self._metrics = metrics
        self._known_tokens = known_tokens
        self._started_s = time.perf_counter()
        self._is_first = True
        self._has_ended = False
        self.tokens = 0
        self.samples = 0
        self.seconds = 0.0
        """From the request's start to its end; 0 until it ends."""

    def made(self, chunk: StageChunk) -> None:
        """Counts what the stage made. A chunk that only marks the end is no output."""
        samples = 0 if chunk.audio is None else len(chunk.audio.samples)
        tokens = max(0, chunk.made.stop - max(chunk.made.start, self._known_tokens))
        if not (tokens or chunk.text or samples or chunk.images):
            return
        if self._is_first:
            self._is_first = False
            self._metrics.first_output.observe(self._passed_s())
        self.tokens += tokens
        self.samples += samples
        self._metrics.tokens.inc(tokens)
        self._metrics.cached_tokens.inc(chunk.cached_tokens)
        self._metrics.samples.inc(samples)
        self._metrics.pieces.inc()

    def handed_over(self, delay_s: float) -> None:
        """Counts a hand-over. By two hosts' clocks it may seem to end before it began."""
        self._metrics.handover.observe(max(0.0, delay_s))

    def end(self, outcome: Outcome) -> bool:
        """Counts the end. Returns False if the request had ended before."""
        if self._has_ended:
            return False
        self._has_ended = True
        self.seconds = self._passed_s()
        self._metrics.request.observe(self.seconds)
        self._metrics.ended(self, outcome)
        return True

    def _passed_s(self) -> float:
        return time.perf_counter() - self._started_s
