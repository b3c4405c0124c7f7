"""What the API adds to the engines: the same bursts over HTTP and to the engines alone, and its own work in parts.

    python -m benchmarks.api_latency --config CONFIG.yaml --out DIR [--streams 1 16 64] [--rounds 4] [--parts-only]

Starts Ray and the application on this machine, then the engines without them, and ends both. A round is as many
streamed requests at once as there are streams; one more comes first and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.api_parts import MIN_REPETITIONS, Part, measured_parts
from omni_cluster.bench.compare import Difference, difference_table, differences
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import http_client
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import Machine, this_machine
from omni_cluster.bench.offline import offline_client
from omni_cluster.bench.record import Client
from omni_cluster.bench.result import FILE_NAME, Cell, Result
from omni_cluster.bench.run import CellPlan, measure
from omni_cluster.bench.table import wide_console
from omni_cluster.cluster.local import LocalCluster
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import OmniError

MIN_REQUESTS = 16
"""Of a number of streams: fewer have no p99 to speak of."""
EVERYTHING = "client, application and engines"
ON_A_CPU = "There is no card here: the times are this CPU's, and only ratios within this run mean anything."


@dataclass(frozen=True, slots=True)
class ApiLatency:
    """What one run came to. `http` and `offline` are None, and `added` is empty, for a run of the parts alone."""

    date: str
    command: str
    note: str | None
    machine: Machine
    load: Load
    http: Result | None
    offline: Result | None
    added: tuple[Difference, ...]
    parts: tuple[Part, ...]


def measured(options: argparse.Namespace) -> ApiLatency:
    """The whole run. Raises BenchError when a request failed: its time would be in none of the figures."""
    command, load = shlex.join(["python", "-m", "benchmarks.api_latency", *sys.argv[1:]]), load_of(options)
    parts = measured_parts(
        bind(load_config(options.config, known_families=known_families())), load, options.repetitions
    )
    http, offline = (None, None) if options.parts_only else both(options, load, command)
    machine = this_machine(EVERYTHING)
    return ApiLatency(
        date=now(),
        command=command,
        note=None if machine.cards else ON_A_CPU,
        machine=machine,
        load=load,
        http=http,
        offline=offline,
        added=tuple(differences(http, offline)) if http and offline else (),
        parts=tuple(parts),
    )


def both(options: argparse.Namespace, load: Load, command: str) -> tuple[Result, Result]:
    """Over HTTP, then the engines alone; never both at once on one machine."""
    config = wide_open(options.config, max(options.streams), options.out)
    with LocalCluster(config, options.port) as cluster:
        cluster.wait_ready()
        client = http_client(cluster.base_url, load, options.timeout)
        http = asyncio.run(run_of(client, cluster.base_url, options, load, command))
    return http, asyncio.run(run_of(offline_client(config, None, load), "offline", options, load, command))


def wide_open(config: Path, streams: int, folder: Path) -> Path:
    """A copy of the configuration that lets `streams` requests in at once, as the engines alone do.

    Else those that wait at the door would count as what the API adds.
    """
    content = yaml.safe_load(config.read_text())
    limits = content.setdefault("limits", {})
    limits["max_ongoing_requests"] = max(streams, limits.get("max_ongoing_requests", 0))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


async def run_of(
    opening: AbstractAsyncContextManager[Client], target: str, options: argparse.Namespace, load: Load, command: str
) -> Result:
    numbers, cells = itertools.count(), []
    async with opening as client:
        for streams in options.streams:
            rounds = max(options.rounds, -(-MIN_REQUESTS // streams))
            plan = CellPlan("burst", streams, requests=streams * rounds, warmup=streams)
            cell, _ = await measure(plan, client.ask, numbers, load)
            cells.append(checked(cell, target))
        machine = this_machine(EVERYTHING)
        return Result(now(), command, target, client.model, machine, load, tuple(cells))


def checked(cell: Cell, target: str) -> Cell:
    print(f"{target}: {cell.name}: {cell.requests} requests, {cell.wall_s:.1f} s", file=sys.stderr, flush=True)
    if cell.errors:
        raise BenchError(
            f"{target}: {cell.errors} of {cell.requests} requests of {cell.name} failed: {cell.first_error}"
        )
    return cell


def print_latency(latency: ApiLatency, console: Console) -> None:
    if latency.http is not None and latency.offline is not None:
        console.print(difference_table(latency.http, latency.offline))
    console.print(part_table(latency.parts))
    if latency.note is not None:
        console.print(latency.note, markup=False, soft_wrap=True)


def part_table(parts: Sequence[Part]) -> Table:
    table = Table("part", "unit", title="the API's own work, in this process")
    for name in ("p50", "p99", "repetitions"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(part.name, part.unit, f"{part.p50:.3f}", f"{part.p99:.3f}", str(part.repetitions))
    return table


def load_of(options: argparse.Namespace) -> Load:
    return Load(options.prompt_tokens, options.text_tokens, options.codec_tokens)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def repetitions(text: str) -> int:
    if positive(text) < MIN_REPETITIONS:
        raise argparse.ArgumentTypeError(f"{text} is too few for a p99; use at least {MIN_REPETITIONS}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.api_latency", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="stage configuration, a YAML file")
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {FILE_NAME}")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16, 64], help="requests at once")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=4,
        help="bursts that are counted (default: 4), and more for fewer than 16 requests",
    )
    parser.add_argument("--repetitions", type=repetitions, default=MIN_REPETITIONS, help="of each part")
    parser.add_argument("--parts-only", action="store_true", help="neither cluster nor engines")
    parser.add_argument("--prompt-tokens", type=positive, default=100, help="words of a message (default: 100)")
    parser.add_argument("--text-tokens", type=positive, default=64, help="of an answer (default: 64)")
    parser.add_argument("--codec-tokens", type=positive, default=512, help="of an answer (default: 512)")
    parser.add_argument("--port", type=positive, default=8000, help="of the HTTP server (default: 8000)")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds of one request (default: 600)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for what was refused or failed."""
    options = parser().parse_args(argv)
    path = options.out / FILE_NAME
    try:
        if path.exists():
            raise BenchError(f"--out is {options.out}, which holds the result of an earlier run; name another folder.")
        options.out.mkdir(parents=True, exist_ok=True)
        latency = measured(options)
    except OmniError as error:
        print(error, file=sys.stderr)
        return 2
    path.write_bytes(msgspec.json.format(msgspec.json.encode(latency), indent=1) + b"\n")
    print_latency(latency, wide_console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
