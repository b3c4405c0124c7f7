"""`omni-cluster bench`: cell after cell, then the report."""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from omni_cluster.bench.capacity import Search, Tried
from omni_cluster.bench.conversation import converse
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import http_client
from omni_cluster.bench.load import (
    NUMBERS_A_CELL,
    Load,
    bursts,
    closed_loop,
    open_loop,
    poisson_arrivals,
    poisson_count,
)
from omni_cluster.bench.machine import Machine, this_machine
from omni_cluster.bench.plot import write_plot
from omni_cluster.bench.record import Ask, Client, RequestRecord
from omni_cluster.bench.result import FILE_NAME, Arrivals, Cell, Result, make_folder, write_requests, write_result
from omni_cluster.bench.stats import cell_of
from omni_cluster.bench.table import gapless_percent, print_result, wide_console

CONCURRENCIES = (1, 4, 16, 32, 64)
ROUNDS = 4
MIN_REQUESTS = 8
OPEN_LOOP_S = 60.0
OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line says. None for `requests` and `warmup`: as many as `CellPlan` finds fit.

    `seconds` is how long requests come in an open loop. With a `search` its cells follow the others.
    """

    load: Load
    out: Path
    command: str
    url: str
    concurrency: tuple[int, ...] = CONCURRENCIES
    rates_per_s: tuple[float, ...] = ()
    burst: bool = False
    seconds: float = OPEN_LOOP_S
    search: Search | None = None
    requests: int | None = None
    warmup: int | None = None
    timeout_s: float = 600.0
    offline: bool = False
    config: Path | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class CellPlan:
    """One cell before it is run: `level` is a concurrency, or the users a second of an open loop."""

    arrivals: Arrivals
    level: float
    requests: int
    warmup: int

    @classmethod
    def of(cls, arrivals: Arrivals, level: float, options: BenchOptions) -> CellPlan:
        at_once = 1 if arrivals == "open" else int(level)
        turns = options.load.turns
        users = max(math.ceil(MIN_REQUESTS / turns), _users(arrivals, level, options))
        return cls(
            arrivals=arrivals,
            level=level,
            requests=options.requests or users * turns,
            warmup=at_once if options.warmup is None else options.warmup,
        )


def _users(arrivals: Arrivals, level: float, options: BenchOptions) -> int:
    """Each asks once, or `turns` times. Of a concurrency all are at work until the last ones."""
    if arrivals == "open":
        return poisson_count(level, options.seconds, options.load.seed)
    return int(level) * math.ceil(ROUNDS / options.load.turns)


def plan(options: BenchOptions) -> list[CellPlan]:
    """All cells but those of a search."""
    by_concurrency: Arrivals = "burst" if options.burst else "closed"
    cells = [CellPlan.of(by_concurrency, level, options) for level in options.concurrency]
    return cells + [CellPlan.of("open", rate, options) for rate in options.rates_per_s]


def next_plan(options: BenchOptions, cells: Sequence[Cell]) -> CellPlan | None:
    """What is run after `cells`; None when all is done."""
    planned = plan(options)
    if len(cells) < len(planned):
        return planned[len(cells)]
    if options.search is None:
        return None
    rate = options.search.next_rate_per_s(_tried(options, cells))
    return None if rate is None else CellPlan.of("open", rate, options)


def _tried(options: BenchOptions, cells: Sequence[Cell]) -> list[Tried]:
    return [Tried(cell.level, cell.gapless_share or 0.0) for cell in cells[len(plan(options)) :]]


def run_bench(options: BenchOptions) -> None:
    """Runs all cells, writes result.json, result.png and requests.jsonl, prints the table.

    Raises BenchError when it cannot begin, and at the end when no request of a cell succeeded, unless a search found
    other rates that pass; OmniError for what the engines refuse.
    """
    make_folder(options.out)
    options.load.prepare()
    result = asyncio.run(_measured(options))
    console = wide_console()
    print_result(result, console)
    plot = write_plot(result, options.out)
    drawn = plot or "no plot, for matplotlib is not installed (extra bench)"
    console.print(f"written: {options.out / FILE_NAME}; {drawn}", markup=False, soft_wrap=True)
    failed = next((cell for cell in result.cells if cell.errors == cell.requests), None)
    if failed is not None and not (result.capacity and result.capacity.passed_per_s):
        raise BenchError(f"no request of {failed.name} succeeded: {failed.first_error}")


async def _measured(options: BenchOptions) -> Result:
    """Writes the result after each cell: what was measured is kept when a later cell breaks off."""
    cells: list[Cell] = []
    progress = Console(stderr=True, highlight=False)
    async with _client(options) as client:
        while (cell_plan := next_plan(options, cells)) is not None:
            numbers = itertools.count(len(cells) * NUMBERS_A_CELL)
            cell, records = await measure(cell_plan, client.ask, numbers, client.load)
            cells.append(cell)
            write_requests(cell.name, records, client.load, options.out)
            write_result(_result(options, client.model, cells), options.out)
            gapless = f"{gapless_percent(cell)} without a gap"
            progress.print(
                f"{cell.name}: {cell.requests} requests, {cell.errors} errors, {gapless}, {cell.wall_s:.1f} s"
            )
        return _result(options, client.model, cells)


def _client(options: BenchOptions) -> AbstractAsyncContextManager[Client]:
    if options.offline:
        # The engines' libraries take seconds to import, and a client of a server needs none of them.
        from omni_cluster.bench.offline import offline_client

        return offline_client(options.config, options.model, options.load)
    return http_client(options.url, options.load, options.timeout_s)


def _result(options: BenchOptions, model: str, cells: Sequence[Cell]) -> Result:
    tried = _tried(options, cells)
    return Result(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=options.command,
        target=OFFLINE if options.offline else options.url,
        model=model,
        machine=_machine(options),
        load=options.load,
        cells=tuple(cells),
        capacity=options.search.found(tried) if options.search and tried else None,
    )


def _machine(options: BenchOptions) -> Machine:
    if options.offline:
        return this_machine("the engines and what loads them")
    return this_machine(f"the client; what serves {options.url} may be another machine with other versions")


async def measure(
    cell_plan: CellPlan, ask: Ask, numbers: Iterator[int], load: Load
) -> tuple[Cell, list[RequestRecord]]:
    """One cell, after requests that are not counted; `numbers` gives each request one that no other has."""
    await bursts(ask, list(itertools.islice(numbers, cell_plan.warmup)), max(1, cell_plan.warmup))
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    records = await _asked(cell_plan, ask, list(itertools.islice(numbers, cell_plan.requests)), load)
    return cell_of(cell_plan.arrivals, cell_plan.level, records, loop.time() - started_s), records


async def _asked(cell_plan: CellPlan, ask: Ask, numbers: list[int], load: Load) -> list[RequestRecord]:
    conversations = [numbers[first : first + load.turns] for first in range(0, len(numbers), load.turns)]
    talk = functools.partial(converse, ask, load)
    if cell_plan.arrivals == "open":
        arrivals_s = poisson_arrivals(cell_plan.level, len(conversations), load.seed)
        records = await open_loop(talk, conversations, arrivals_s)
    else:
        arrive = bursts if cell_plan.arrivals == "burst" else closed_loop
        records = await arrive(talk, conversations, int(cell_plan.level))
    return list(itertools.chain.from_iterable(records))
