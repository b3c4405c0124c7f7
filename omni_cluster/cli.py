"""The command `omni-cluster`: make a checkpoint, check a configuration, see the whole pipeline work, measure it."""

# torch, vLLM and Ray take seconds to import and `--help` needs none of them, so the commands import what they use.
from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omni_cluster.cli_bench import add_bench
from omni_cluster.cli_terminal import add_chat, add_top
from omni_cluster.cli_values import UsageError, add_config, check_ranges, count, port, positive, share, whole
from omni_cluster.types.errors import OmniError

if TYPE_CHECKING:
    from omni_cluster.config.schema import PipelineConfig
    from omni_cluster.planning.measured import Measured
    from omni_cluster.planning.plan import ClusterPlan, Target

PROGRAM = "omni-cluster"
BAD_INPUT = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: the process's own arguments) and returns its exit code.

    What is wrong with input is one line on stderr and exit code 2.
    """
    try:
        options = _parser().parse_args(argv)
        options.command_line = shlex.join([PROGRAM, *(sys.argv[1:] if argv is None else argv)])
        options.run(options)
    except OmniError as error:
        print(f"{PROGRAM}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as stopped:
        if not stopped.args:  # a cluster that ends has said it
            print(f"\n{PROGRAM}: stopped by Ctrl-C.", file=sys.stderr)
        return INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows what is accepted.")


class _Voices(argparse.Action):
    """The former name of `--streams`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        print(f"{PROGRAM}: --voices is called --streams now, use that.", file=sys.stderr)
        namespace.streams = values


class _Version(argparse.Action):
    """Asks what is installed only where it is wanted: a checkout need not be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(PROGRAM, metadata.version(PROGRAM))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Serve omni-modality models as stages on Ray Serve and vLLM.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the installed version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_serve(commands)
    _add_check(commands)
    _add_warm(commands)
    _add_make_checkpoint(commands)
    add_bench(commands)
    _add_plan(commands)
    add_chat(commands)
    add_top(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("demo", help="start a cluster here, ask it by text, sound and image, and stop it")
    command.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the sound (default: demo_out)")
    add_config(command, "--config")
    command.add_argument("--port", type=port, default=8000, help="HTTP port of the server (default: 8000)")
    command.add_argument(
        "--keep", action="store_true", help="leave the cluster up until Ctrl-C, for its page in a browser"
    )
    command.set_defaults(run=_demo)


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("serve", help="serve the HTTP API from this process alone, without Ray")
    add_config(command, "config")
    command.add_argument("--local", action="store_true", help="all stages in this process, for development; required")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=port, default=8000, help="port to listen on (default: 8000)")
    command.set_defaults(run=_serve)


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("check", help="check a configuration and print what it comes to; starts nothing")
    add_config(command, "config")
    command.add_argument(
        "--card-gib", type=positive, metavar="N", help="print what each engine takes of a card of N GiB, by parts"
    )
    command.add_argument("--model", metavar="DIR", help="with --card-gib: a checkpoint in place of the configuration's")
    command.set_defaults(run=_check)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("plan", help="say how many cards a number of streams takes, by what was measured")
    command.add_argument("config", type=Path, metavar="CONFIG", help="stage configuration of the model, a YAML file")
    command.add_argument("--streams", type=positive, metavar="N", help="at the same time (default: what fits)")
    command.add_argument("--voices", type=positive, action=_Voices, dest="streams", help=argparse.SUPPRESS)
    command.add_argument("--cards", type=count, metavar="N", help="there are (default: as many as it takes)")
    command.add_argument("--card", metavar="KIND", help="h100 or h200 (default: the one of the family's measured.json)")
    command.add_argument("--cards-per-host", type=count, default=8, metavar="N", help="(default: 8)")
    command.add_argument(
        "--without-gap", type=share, default=0.99, metavar="P", help="of the streams at least (default: 0.99)"
    )
    command.add_argument(
        "--first-audio", type=positive, default=1.0, metavar="S", help="within which 95 of 100 hear it (default: 1)"
    )
    command.add_argument(
        "--mix-sound", type=positive, nargs=2, default=(2.0, 20.0), metavar=("LOW", "HIGH"),
        help="seconds of an answer (default: 2 20)",
    )  # fmt: skip
    command.add_argument(
        "--mix-prompt", type=count, nargs=2, default=(20, 2000), metavar=("LOW", "HIGH"),
        help="tokens of a prompt (default: 20 2000)",
    )  # fmt: skip
    command.add_argument("--card-gib", type=positive, metavar="N", help="print what each engine takes of such a card")
    command.add_argument("--model", metavar="DIR", help="with --card-gib: a checkpoint in place of the configuration's")
    command.add_argument("--day", type=whole, metavar="BURSTS", help="simulate a day with so many bursts, autoscaled")
    command.add_argument("--seed", type=whole, default=0, metavar="N", help="of the day (default: 0)")
    command.add_argument("--write", type=Path, metavar="OUT", help="new stage configuration of the plan")
    command.add_argument(
        "--follow-load", action="store_true", help="with --write: replicas up to the plan's, by each stage's signals"
    )
    command.set_defaults(run=_plan)


def _add_warm(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("warm", help="start each engine once, so that later starts need not compile")
    add_config(command, "config")
    command.set_defaults(run=_warm)


def _add_make_checkpoint(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("make-checkpoint", help="write a checkpoint of random weights, for tests and timing")
    command.add_argument("--preset", required=True, help="its sizes, such as tiny, 3b or 7b")
    command.add_argument("--device", help="cpu or cuda, where the weights are drawn (default: the preset's choice)")
    command.add_argument("--family", help="model family (default: the first that is registered)")
    command.add_argument("out", type=Path, metavar="OUT", help="the new folder of the checkpoint")
    command.set_defaults(run=_make_checkpoint)


def _demo(options: argparse.Namespace) -> None:
    from omni_cluster.demo import run_demo

    run_demo(options.config, options.port, options.out, keep=options.keep)


def _serve(options: argparse.Namespace) -> None:
    if not options.local:
        raise UsageError("serve needs --local; on a cluster, Ray serves: serve run deployments:app config=CONFIG.")
    from omni_cluster.serve_local import run_server

    run_server(options.config, options.host, options.port)


def _check(options: argparse.Namespace) -> None:
    from omni_cluster.config.loader import load_config
    from omni_cluster.config.plan import render_plan, resolve_plan
    from omni_cluster.engine.build import adapters_of, check_stages
    from omni_cluster.models.lora import described
    from omni_cluster.models.registry import known_families

    if options.model and not options.card_gib:
        raise UsageError("--model is for the memory of a card; add --card-gib, for example --card-gib 80.")
    config = load_config(options.config, known_families=known_families())
    check_stages(config)
    plan = render_plan(resolve_plan(config)) + "".join(f"{line}\n" for line in described(adapters_of(config)))
    memory = _card_memory(config, options) if options.card_gib else ""
    print(plan + memory, end="")


def _plan(options: argparse.Namespace) -> None:
    from omni_cluster.config.loader import load_config
    from omni_cluster.engine.build import check_stages
    from omni_cluster.models.registry import known_families
    from omni_cluster.planning.measured import measured_of
    from omni_cluster.planning.plan import plan_cluster
    from omni_cluster.planning.report import render
    from omni_cluster.planning.written import planned_config, write_config

    target = _plan_target(options)
    config = load_config(options.config, known_families=known_families())
    measured = measured_of(config.family, options.card)
    plan = plan_cluster(measured, target)
    planned = planned_config(config, plan, options.follow_load)
    check_stages(planned)
    memory = _card_memory(planned, options) if options.card_gib else ""
    day = _simulated_day(plan, measured, options) if options.day is not None else ""
    if options.write:
        write_config(options.write, planned, options.command_line)
    print(render(plan, measured) + day + memory, end="")


def _plan_target(options: argparse.Namespace) -> Target:
    """Raises UsageError for options that say too little, or two things."""
    from omni_cluster.planning.plan import Range, Target

    if options.streams is None and options.cards is None:
        raise UsageError("plan needs --streams or --cards; add one, for example --streams 100.")
    if options.model and not options.card_gib:
        raise UsageError("--model is for the memory of a card; add --card-gib, for example --card-gib 80.")
    if options.follow_load and not options.write:
        raise UsageError("--follow-load is for --write; add --write OUT, or leave it out.")
    check_ranges(options, ("--mix-sound", "--mix-prompt"))
    return Target(
        sound_s=Range(*options.mix_sound),
        prompt_tokens=Range(*options.mix_prompt),
        streams=options.streams,
        cards=options.cards,
        cards_per_host=options.cards_per_host,
        without_gap=options.without_gap,
        first_audio_s=options.first_audio,
    )


def _simulated_day(plan: ClusterPlan, measured: Measured, options: argparse.Namespace) -> str:
    from omni_cluster.planning.report import render_day
    from omni_cluster.planning.simulation import day_rates, simulate

    if plan.layout == "together":
        raise UsageError("--day is for plans of two cards or more; one card has nothing to give back.")
    rules = plan.pipeline.rules({part.name: part.replicas for part in plan.stages})
    rates = day_rates(plan.rate_per_s, options.day, options.seed)
    return render_day(simulate(plan.pipeline, rules, rates, measured.start_s.value, options.seed))


def _card_memory(config: PipelineConfig, options: argparse.Namespace) -> str:
    from omni_cluster.engine.fitting import bind_downloaded, memory_plan
    from omni_cluster.memory.plan import render_memory
    from omni_cluster.memory.sizes import GIB
    from omni_cluster.models.dropped_warnings import OF_CHECKPOINTS, drop_warnings

    drop_warnings(OF_CHECKPOINTS)
    if options.model:
        config = config.model_copy(update={"model": options.model})
    plan = memory_plan(bind_downloaded(config), int(options.card_gib * GIB))
    return "\n" + render_memory(plan)


def _warm(options: argparse.Namespace) -> None:
    from omni_cluster.config.loader import load_config
    from omni_cluster.engine.build import check_stages
    from omni_cluster.engine.caches import check_cache_dir
    from omni_cluster.engine.python_modules import compile_modules, installed_folders
    from omni_cluster.engine.warming import size_of, warm
    from omni_cluster.models.registry import known_families

    config = load_config(options.config, known_families=known_families())
    check_stages(config)
    folder = check_cache_dir(config.cache_dir)
    modules = compile_modules(installed_folders())
    print(f"Python modules: {modules.done} compiled, {modules.left} could not be", flush=True)
    for started in warm(config):
        print(f"{started.model_stage}: its engine was up after {started.seconds:.1f} s", flush=True)
    files, size_bytes = size_of(folder)
    print(f"{folder}: {files} files, {size_bytes / (1 << 20):.1f} MiB")


def _make_checkpoint(options: argparse.Namespace) -> None:
    from omni_cluster.models.dropped_warnings import OF_CHECKPOINTS, drop_warnings
    from omni_cluster.models.registry import family_class, known_families

    drop_warnings(OF_CHECKPOINTS)
    family = family_class(options.family or known_families()[0])
    print(family.make_checkpoint(options.preset, options.out, device=options.device, progress=print))
