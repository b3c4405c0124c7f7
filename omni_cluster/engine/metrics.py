"""What one replica of a stage counts of its requests."""

from __future__ import annotations

import time
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from omni_cluster.outputs import StageChunk

Outcome = Literal["finished", "failed", "cancelled"]

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
HANDOVER_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class StageMetrics:
    """The metrics of one replica, in a registry of their own: a process may have others, vLLM's for one."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ended = Counter(
            "omni_cluster_stage_requests_total", "Requests by how they ended here.", ["outcome"], registry=registry
        )
        self._ended = {outcome: ended.labels(outcome) for outcome in get_args(Outcome)}  # all there from the start
        self._running = Gauge(
            "omni_cluster_stage_requests_running", "Requests that the engine works on.", registry=registry
        )
        self._waiting = Gauge(
            "omni_cluster_stage_requests_waiting", "Requests that wait for the engine.", registry=registry
        )
        self._open_logs = Gauge(
            "omni_cluster_stage_open_outboxes", "Requests whose output is kept for their readers.", registry=registry
        )
        self.first_output = Histogram(
            "omni_cluster_stage_first_output_seconds",
            "From a request's coming to its first output here.",
            registry=registry,
            buckets=SECONDS,
        )
        self.request = Histogram(
            "omni_cluster_stage_request_seconds",
            "From a request's coming to its end here, however it ended.",
            registry=registry,
            buckets=SECONDS,
        )
        self.handover = Histogram(
            "omni_cluster_stage_handover_seconds",
            "From a chunk's making at the stage before to its arrival here, by the clocks of both.",
            registry=registry,
            buckets=HANDOVER_SECONDS,
        )
        self.tokens = Counter(
            "omni_cluster_stage_tokens_total", "Tokens made, stop tokens included.", registry=registry
        )
        self.cached_tokens = Counter(
            "omni_cluster_stage_cached_tokens_total", "Prompt tokens read from the prefix cache.", registry=registry
        )
        self.samples = Counter("omni_cluster_stage_samples_total", "Samples of sound made.", registry=registry)
        self.pieces = Counter(
            "omni_cluster_stage_pieces_total", "Chunks with tokens, text or sound made.", registry=registry
        )

    def begin(self) -> RequestMeter:
        """For a request that comes now."""
        return RequestMeter(self)

    def ended(self, outcome: Outcome) -> None:
        self._ended[outcome].inc()

    def hold(self, running: int, waiting: int, open_logs: int) -> None:
        """What the replica holds now."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._open_logs.set(open_logs)


class RequestMeter:
    """One request in one stage: counts its output as it is made, and its end once."""

    def __init__(self, metrics: StageMetrics) -> None:
        self._metrics = metrics
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
        if not (chunk.token_ids or chunk.text or samples):
            return
        if self._is_first:
            self._is_first = False
            self._metrics.first_output.observe(self._passed_s())
        self.tokens += len(chunk.token_ids)
        self.samples += samples
        self._metrics.tokens.inc(len(chunk.token_ids))
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
        self._metrics.ended(outcome)
        return True

    def _passed_s(self) -> float:
        return time.perf_counter() - self._started_s
