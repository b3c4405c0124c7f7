"""`omni-cluster top`: what a server's stages and endpoints do, as it changes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_cluster.api_client import ServedModel, body_of, printable
from omni_cluster.engine import metric_definitions as define
from omni_cluster.terminal.scrape import STALLED_S, Scrape, Span
from omni_cluster.terminal.server import Server, TerminalError

WIDTH: Final = 120
"""Of what is no terminal."""
LOOK_S: Final = 0.2
"""Between looks for a scrape that is new: the server may give one that is a second old."""


def run_top(url: str, key_file: Path | None, every_s: float, is_once: bool) -> None:
    """Shows a view each `every_s` until Ctrl-C; one alone where it is asked for, or where there is no terminal.

    Raises TerminalError for a server that does not answer at the start; later ones are shown.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    with Server(url, key_file) as server, contextlib.suppress(KeyboardInterrupt):
        watch = Watch(server)
        if is_once or not console.is_terminal:
            console.print(watch.view(every_s))
            return
        with Live(watch.first(), console=console, auto_refresh=False) as live:
            while True:
                live.update(_seen(watch, every_s), refresh=True)


def _seen(watch: Watch, every_s: float) -> RenderableType:
    """The next view, or why there is none."""
    try:
        return watch.view(every_s)
    except TerminalError as error:
        time.sleep(every_s)
        return Text(str(error))


class Watch:
    """One server, from view to view."""

    def __init__(self, server: Server) -> None:
        """Raises TerminalError."""
        self._server = server
        self._model = server.model()
        self._last = self._scrape()

    def first(self) -> RenderableType:
        """Before a rate is known."""
        return self._view(Span(self._last, self._last))

    def view(self, every_s: float) -> RenderableType:
        """What was in the next `every_s` seconds. Raises TerminalError."""
        before, self._last = self._last, self._scrape_after(every_s)
        return self._view(Span(before, self._last))

    def _scrape_after(self, every_s: float) -> Scrape:
        time.sleep(every_s)
        ends_s = time.monotonic() + max(every_s, 10.0)
        while (scrape := self._scrape()).at_s <= self._last.at_s and time.monotonic() < ends_s:
            time.sleep(LOOK_S)
        return scrape

    def _scrape(self) -> Scrape:
        text = self._server.text("/metrics")
        with contextlib.suppress(ValueError):
            if (scrape := Scrape.of(text)).at_s:
                return scrape
        raise TerminalError(f"{self._server.url} has no metrics of this application at /metrics.")

    def _view(self, span: Span) -> RenderableType:
        return Group(self._head(span), stages(span, self._model), endpoints(span))

    def _head(self, span: Span) -> Text:
        ready, now = body_of(self._server.text("/ready")), span.now
        state = "ready" if ready.get("ready") else str(ready.get("reason") or "not ready")
        running, waiting = (now.total(define.PLACES.name, state=each) for each in ("taken", "waiting"))
        missing = int(now.total(define.MISSING.name))
        sentence = (
            f"{self._model.name} at {self._server.url}: {state}; {running:.0f} requests run, {waiting:.0f} wait, "
            f"{now.total(define.SESSIONS.name):.0f} sessions"
        )
        return Text(printable(f"{sentence}; {missing} replicas do not answer" if missing else sentence))


def stages(span: Span, model: ServedModel) -> Table:
    """A line a stage."""
    table = _table("stage", "replicas", "running", "waiting", "tokens/s", "sound s/s", "held MiB", "ended/s", "failed")
    for stage in span.now.values(define.RUNNING, "stage"):
        samples = span.rate(define.SAMPLES.name, stage=stage)
        table.add_row(
            stage,
            str(span.now.replicas(stage)),
            *(f"{span.now.total(each.name, stage=stage):.0f}" for each in (define.RUNNING, define.WAITING)),
            _rate(span.rate(define.TOKENS.name, stage=stage)),
            _rate(samples / model.sample_rate_hz if samples is not None and model.sample_rate_hz else None),
            f"{span.now.total(define.HELD_BYTES.name, stage=stage) / 2**20:.1f}",
            _rate(span.rate(define.REQUESTS.name, stage=stage)),
            f"{span.now.total(define.REQUESTS.name, stage=stage, outcome='failed'):.0f}",
        )
    return table


def endpoints(span: Span) -> Table:
    """A line an endpoint that was asked; of its streams with sound how many stalled, and how long in all."""
    table = _table(
        "endpoint", "in flight", "ended/s", "ended", "refused", "streams", "stalled", "stall s", "sent KiB/s"
    )
    for path in span.now.values(define.IN_FLIGHT, "endpoint"):
        streams = span.now.total(f"{define.STALL.name}_count", endpoint=path)
        smooth = span.now.total(f"{define.STALL.name}_bucket", endpoint=path, le=str(STALLED_S))
        sent = span.rate(define.SENT_BYTES.name, endpoint=path)
        table.add_row(
            path,
            f"{span.now.total(define.IN_FLIGHT.name, endpoint=path):.0f}",
            _rate(span.rate(define.INGRESS_REQUESTS.name, endpoint=path)),
            f"{span.now.total(define.INGRESS_REQUESTS.name, endpoint=path):.0f}",
            f"{span.now.total(define.REFUSALS.name, endpoint=path):.0f}",
            f"{streams:.0f}",
            f"{streams - smooth:.0f}",
            f"{span.now.total(f'{define.STALL.name}_sum', endpoint=path):.2f}",
            _rate(sent / 1024 if sent is not None else None),
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
