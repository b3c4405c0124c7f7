"""The command `omni-cluster bench`."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_cluster.cli_values import (
    UsageError,
    add_config,
    check_ranges,
    count,
    positive,
    precision,
    said,
    share,
    whole,
)

if TYPE_CHECKING:
    from omni_cluster.bench.capacity import Search
    from omni_cluster.bench.load import Load


def add_bench(commands: argparse._SubParsersAction[Any]) -> None:
    command = commands.add_parser("bench", help="put load on a server, or on the engines alone, and measure")
    _add_bench_target(command)
    _add_bench_arrivals(command)
    _add_bench_capacity(command)
    _add_bench_load(command)
    _add_bench_realtime(command)
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder of the results (default: bench_out/ and the time)"
    )
    command.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="print what result.json A takes more than B, no load"
    )
    command.set_defaults(run=_bench)


def _add_bench_target(command: argparse.ArgumentParser) -> None:
    target = command.add_argument_group("what is measured")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    target.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of one request (default: 600)")
    target.add_argument("--offline", action="store_true", help="the engines alone, in this process: no Ray, no HTTP")
    add_config(target, "--config")
    target.add_argument("--model", metavar="DIR", help="with --offline: a checkpoint in place of the configuration's")


def _add_bench_arrivals(command: argparse.ArgumentParser) -> None:
    arrivals = command.add_argument_group("when requests come")
    arrivals.add_argument(
        "--concurrency",
        type=count,
        nargs="+",
        metavar="C",
        help="clients that ask one after another (default: 1 4 16 32 64, none with --rate or --find-capacity)",
    )
    arrivals.add_argument("--burst", action="store_true", help="C requests at once, the next C when all have ended")
    arrivals.add_argument(
        "--rate",
        type=positive,
        nargs="+",
        default=[],
        metavar="R",
        help="requests a second, whether or not earlier ones have ended; gaps are exponential (Poisson)",
    )
    arrivals.add_argument(
        "--seconds", type=positive, metavar="S", help="how long requests come at each rate (default: 60)"
    )
    arrivals.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="requests of each cell (default: 4 C, or those that come in --seconds; at least 8)",
    )
    arrivals.add_argument(
        "--warmup", type=whole, metavar="N", help="requests before each cell that are not counted (default: C, or 1)"
    )
    arrivals.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="of messages, lengths and arrival times (default: 0)"
    )


def _add_bench_capacity(command: argparse.ArgumentParser) -> None:
    capacity = command.add_argument_group("the highest rate at which streams have no gap")
    capacity.add_argument("--find-capacity", action="store_true", help="search it, by cells of an open loop")
    capacity.add_argument(
        "--capacity-between", type=positive, nargs=2, metavar=("LOW", "HIGH"), help="rates (default: 0.25 64)"
    )
    capacity.add_argument(
        "--capacity-share", type=share, metavar="P", help="of the streams that have no gap (default: 0.99)"
    )
    capacity.add_argument(
        "--capacity-precision", type=precision, metavar="P", help="of the rate, as a part of it (default: 0.1)"
    )


def _add_bench_realtime(command: argparse.ArgumentParser) -> None:
    realtime = command.add_argument_group("conversations by voice")
    realtime.add_argument(
        "--realtime",
        action="store_true",
        help="C clients of the Realtime API speak, wait for the first sound, and interrupt it (default: 1 16; 4 turns)",
    )
    realtime.add_argument("--idle", type=whole, metavar="N", help="sessions beside them that say nothing (default: 0)")


def _add_bench_load(command: argparse.ArgumentParser) -> None:
    load = command.add_argument_group("what a request is")
    load.add_argument("--prompt-tokens", type=count, metavar="N", help="words of a message (default: 100)")
    load.add_argument("--text-tokens", type=count, metavar="N", help="of an answer (default: 64)")
    load.add_argument("--codec-tokens", type=count, metavar="N", help="of an answer (default: 512)")
    load.add_argument("--mix", action="store_true", help="requests of mixed lengths, drawn by the seed, some spoken")
    load.add_argument(
        "--mix-sound", type=positive, nargs=2, metavar=("LOW", "HIGH"), help="seconds of an answer (default: 2 20)"
    )
    load.add_argument(
        "--mix-prompt", type=count, nargs=2, metavar=("LOW", "HIGH"),
        help="words of a prompt, or tokens of a spoken one (default: 20 2000)",
    )  # fmt: skip
    load.add_argument("--mix-spoken", type=share, metavar="P", help="of the prompts are spoken (default: 0.5)")
    load.add_argument(
        "--turns", type=count, metavar="N", help="of one user, each with those before in its prompt (default: 1)"
    )
    load.add_argument(
        "--pause", type=positive, metavar="S", help="between an answer's sound and the next turn (default: 1)"
    )
    load.add_argument("--voice", help="(default: the model's)")
    load.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="streams (default), or whole answers"
    )


def _bench(options: argparse.Namespace) -> None:
    if options.compare:
        from omni_cluster.bench.compare import run_compare

        run_compare(*options.compare)
        return
    _check_bench(options)
    if options.realtime:
        _bench_realtime(options)
        return
    from omni_cluster.bench.run import CONCURRENCIES, OPEN_LOOP_S, BenchOptions, run_bench

    is_open = options.rate or options.find_capacity
    run_bench(
        BenchOptions(
            load=_bench_load(options),
            out=options.out or _new_bench_folder(),
            command=options.command_line,
            url=options.url,
            concurrency=tuple(options.concurrency or (() if is_open else CONCURRENCIES)),
            rates_per_s=tuple(options.rate),
            burst=options.burst,
            seconds=options.seconds or OPEN_LOOP_S,
            search=_bench_search(options),
            requests=options.requests,
            warmup=options.warmup,
            timeout_s=options.timeout,
            offline=options.offline,
            config=options.config,
            model=options.model,
        )
    )


def _bench_realtime(options: argparse.Namespace) -> None:
    from omni_cluster.bench.realtime import RealtimeOptions, run_realtime

    given = _given(concurrency=options.concurrency, turns=options.turns, idle=options.idle)
    out = options.out or _new_bench_folder()
    run_realtime(RealtimeOptions(options.url, out, options.command_line, timeout_s=options.timeout, **given))


def _new_bench_folder() -> Path:
    return Path("bench_out") / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")


def _bench_load(options: argparse.Namespace) -> Load:
    from omni_cluster.bench.load import Load
    from omni_cluster.bench.mix import Mix

    ranges = {"sound_s": options.mix_sound, "prompt_tokens": options.mix_prompt}
    mix = Mix(**_given(spoken_share=options.mix_spoken, **ranges)) if options.mix else None
    named = {name: getattr(options, name) for name in ("prompt_tokens", "text_tokens", "codec_tokens", "turns")}
    given = _given(**named, pause_s=options.pause)
    return Load(**given, voice=options.voice, stream=options.stream, seed=options.seed, mix=mix)


def _bench_search(options: argparse.Namespace) -> Search | None:
    from omni_cluster.bench.capacity import Search

    if not options.find_capacity:
        return None
    share, precision = options.capacity_share, options.capacity_precision
    return Search(**_given(share=share, precision=precision, between_per_s=options.capacity_between))


def _given(**values: Any) -> dict[str, Any]:
    """What the command line says; what it does not is left to its defaults."""
    said = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}


_USELESS_WITHOUT = {
    "--config": ("--offline",),
    "--model": ("--offline",),
    "--seconds": ("--rate", "--find-capacity"),
    "--capacity-between": ("--find-capacity",),
    "--capacity-share": ("--find-capacity",),
    "--capacity-precision": ("--find-capacity",),
    "--mix-sound": ("--mix",),
    "--mix-prompt": ("--mix",),
    "--mix-spoken": ("--mix",),
    "--pause": ("--turns",),
    "--idle": ("--realtime",),
}
_NOT_BOTH = {
    "--seconds": ("--requests",),
    "--find-capacity": ("--rate", "--concurrency", "--burst", "--requests", "--turns"),
    "--mix": ("--prompt-tokens", "--text-tokens", "--codec-tokens"),
    "--realtime": (
        "--offline", "--rate", "--find-capacity", "--burst", "--requests", "--warmup", "--mix", "--prompt-tokens",
        "--text-tokens", "--codec-tokens", "--pause", "--voice",
    ),
}  # fmt: skip
_RANGES = ("--capacity-between", "--mix-sound", "--mix-prompt")


def _check_bench(options: argparse.Namespace) -> None:
    """Raises UsageError for options of which one would be ignored."""
    for option, needed in _USELESS_WITHOUT.items():
        if said(options, option) and not any(said(options, other) for other in needed):
            raise UsageError(f"{option} is for {' and '.join(needed)}; add {' or '.join(needed)}, or leave it out.")
    for option, others in _NOT_BOTH.items():
        for other in others:
            if said(options, option) and said(options, other):
                raise UsageError(f"{option} does not go with {other}; leave one of them out.")
    if options.burst and options.rate and not options.concurrency:
        raise UsageError("--burst is for --concurrency, and --rate has none; leave one of them out.")
    check_ranges(options, _RANGES)
