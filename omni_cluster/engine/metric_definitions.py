"""Every metric of the application: what `/metrics`, Ray's page of a node and the Grafana board are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["requests", "replicas", "tokens", "samples", "chunks", "bytes", "seconds", "sessions"]

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
HANDOVER_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric. `labels`: its own; each sample also has its `replica`, a stage's its `stage`."""

    name: str
    """As `/metrics` says it, a counter's with `_total`."""
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.help, self.labels, registry=registry, buckets=self.buckets)


def _stage(name: str, kind: Kind, unit: Unit, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(f"omni_cluster_stage_{name}", kind, unit, help, labels)


def _stage_seconds(name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> MetricDefinition:
    return MetricDefinition(f"omni_cluster_stage_{name}_seconds", "histogram", "seconds", help, (), buckets)


def _ingress(name: str, kind: Kind, unit: Unit, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(f"omni_cluster_ingress_{name}", kind, unit, help, labels)


def _ingress_seconds(name: str, what: str) -> MetricDefinition:
    full, help = f"omni_cluster_ingress_{name}_seconds", f"{what} Refused requests are not counted."
    return MetricDefinition(full, "histogram", "seconds", help, ("endpoint",), SECONDS)


# ------------------------------------------------------------------ of each replica of a stage

REQUESTS: Final = _stage(
    "requests_total",
    "counter",
    "requests",
    "Requests that ended here, by outcome: finished, failed, or cancelled (the client left, or another stage "
    "failed first).",
    "outcome",
)
RUNNING: Final = _stage(
    "requests_running",
    "gauge",
    "requests",
    "Requests, or jobs of a sound stage, that the engine works on, those that wait for hidden states included.",
)
WAITING: Final = _stage("requests_waiting", "gauge", "requests", "Requests, jobs or streams that wait for the engine.")
HELD: Final = _stage(
    "requests_held",
    "gauge",
    "requests",
    "Requests in the engine whose next step waits for hidden states of the stage before; 0 where it takes none.",
)
HELD_BYTES: Final = _stage(
    "held_bytes",
    "gauge",
    "bytes",
    "Bytes of hidden states, audio and images in output buffers, received and not read, or being sent; at "
    "advanced.limits.replica_outbox_max_bytes no further request begins here.",
)
OPEN_LOGS: Final = _stage(
    "open_outboxes",
    "gauge",
    "requests",
    "Requests whose output buffer is kept for its readers, until the request ends in all stages.",
)
FIRST_OUTPUT: Final = _stage_seconds(
    "first_output",
    "From a request's arrival to its first output here; in later stages the wait for the stage before included.",
)
REQUEST: Final = _stage_seconds("request", "From a request's arrival to its end here, however it ended.")
HANDOVER: Final = _stage_seconds(
    "handover",
    "From when the stage before made a chunk to its arrival here; between two hosts as exact as their clocks agree.",
    HANDOVER_SECONDS,
)
TOKENS: Final = _stage("tokens_total", "counter", "tokens", "Tokens of text made, stop tokens included, or codes.")
CACHED_TOKENS: Final = _stage(
    "cached_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens read from the prefix cache and not computed; of requests with audio as many as have hidden states "
    "(advanced.handover.kept_rows_bytes).",
)
SAMPLES: Final = _stage("samples_total", "counter", "samples", "Samples of sound made.")
PIECES: Final = _stage("pieces_total", "counter", "chunks", "Chunks made that have tokens, text, sound or pictures.")

STAGE: Final = (
    REQUESTS,
    RUNNING,
    WAITING,
    HELD,
    HELD_BYTES,
    OPEN_LOGS,
    FIRST_OUTPUT,
    REQUEST,
    HANDOVER,
    TOKENS,
    CACHED_TOKENS,
    SAMPLES,
    PIECES,
)

# ------------------------------------------------------------------ of each ingress

INGRESS_REQUESTS: Final = _ingress(
    "requests_total",
    "counter",
    "requests",
    "Requests that ended, by HTTP status; 499: the client left before it had the whole answer; 500: also a stream "
    "of bytes that broke off; a stream of events that ends with an error event has 200.",
    "endpoint",
    "status",
)
REFUSALS: Final = _ingress(
    "refusals_total",
    "counter",
    "requests",
    "Answers with an error's status, by the error's code, or none; clients that left, and errors that end a "
    "stream, are not counted.",
    "endpoint",
    "reason",
)
IN_FLIGHT: Final = _ingress(
    "requests_in_flight",
    "gauge",
    "requests",
    "Requests without their whole answer, the scrape among them.",
    "endpoint",
)
FIRST_BYTE: Final = _ingress_seconds("first_byte", "From a request's headers to the first byte of the answer's body.")
FIRST_AUDIO: Final = _ingress_seconds(
    "first_audio", "Time to first audio: from a request's headers to a stream's first sound at the ingress."
)
STALL: Final = _ingress_seconds(
    "stall",
    "How long the player of a stream with audio stalled in all, if it had each chunk when the ingress had it; "
    "streams that clients left included.",
)
ANSWER: Final = _ingress_seconds("answer", "From a request's headers to the end of the whole answer.")
RECOVERED: Final = _ingress(
    "recovered_total",
    "counter",
    "requests",
    "How often requests went on although a replica of the stage was lost that worked on them; unknown: which stage is "
    "not known.",
    "endpoint",
    "stage",
)
RECOVERY_STALL: Final = _ingress_seconds(
    "recovery_stall", "From when a replica's loss was noticed to the request's next output."
)
SENT_BYTES: Final = _ingress("sent_bytes_total", "counter", "bytes", "Bytes of answers' bodies.", "endpoint")
PLACES: Final = _ingress(
    "places", "gauge", "requests", "Requests that run (state taken), and that wait for a slot (state waiting).", "state"
)
SESSIONS: Final = _ingress(
    "sessions", "gauge", "sessions", "Sessions that are open, of conversations and of texts that are spoken."
)
UPLOAD_BYTES: Final = _ingress(
    "upload_bytes", "gauge", "bytes", "Bytes of requests' bodies that are not worked on yet, 64 KiB for each included."
)

INGRESS: Final = (
    INGRESS_REQUESTS,
    REFUSALS,
    IN_FLIGHT,
    FIRST_BYTE,
    FIRST_AUDIO,
    STALL,
    ANSWER,
    RECOVERED,
    RECOVERY_STALL,
    SENT_BYTES,
    PLACES,
    SESSIONS,
    UPLOAD_BYTES,
)

# ------------------------------------------------------------------ of a scrape

SCRAPED_AT: Final = MetricDefinition(
    "omni_cluster_scrape_timestamp_seconds",
    "gauge",
    "seconds",
    "Unix time at which these samples were taken; scrapes less than a second apart may get the same ones.",
)
MISSING: Final = MetricDefinition(
    "omni_cluster_scrape_missing",
    "gauge",
    "replicas",
    "Replicas that did not answer in time and are not in this scrape, by stage (ingress too); 1 for a stage of "
    "which none is known, 0 if it may sleep.",
    ("stage",),
)

SCRAPE: Final = (SCRAPED_AT, MISSING)

ALL: Final = (*STAGE, *INGRESS, *SCRAPE)
