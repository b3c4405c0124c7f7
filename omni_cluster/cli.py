"""The command `omni-cluster`: make a checkpoint, check a configuration, see the whole pipeline work."""

# torch, vLLM and Ray take seconds to import and `--help` needs none of them, so the commands import what they use.
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from omni_cluster.errors import OmniError

PROGRAM = "omni-cluster"
BAD_INPUT = 2
INTERRUPTED = 130


class UsageError(OmniError):
    """A command line that names no command, or one with arguments that do not fit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: the process's own arguments) and returns its exit code.

    What is wrong with input is one line on stderr and exit code 2.
    """
    try:
        options = _parser().parse_args(argv)
        options.run(options)
    except OmniError as error:
        print(f"{PROGRAM}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows what is accepted.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Serve omni-modality models as stages on Ray Serve and vLLM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_check(commands)
    _add_make_checkpoint(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("demo", help="start a cluster here, ask it by text, sound and image, and stop it")
    command.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the sound (default: demo_out)")
    _add_config(command, "--config")
    command.add_argument("--port", type=_port, default=8000, help="HTTP port of the server (default: 8000)")
    command.set_defaults(run=_demo)


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("check", help="check a configuration and print what it comes to; starts nothing")
    _add_config(command, "config")
    command.set_defaults(run=_check)


def _add_make_checkpoint(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("make-checkpoint", help="write a checkpoint of random weights, for tests and timing")
    command.add_argument("--preset", required=True, help="its sizes, such as tiny, 3b or 7b")
    command.add_argument("--device", help="cpu or cuda, where the weights are drawn (default: the preset's choice)")
    command.add_argument("--family", help="model family (default: the first that is registered)")
    command.add_argument("out", type=Path, metavar="OUT", help="the new folder of the checkpoint")
    command.set_defaults(run=_make_checkpoint)


def _add_config(command: argparse.ArgumentParser, name: str) -> None:
    optional = {} if name.startswith("-") else {"nargs": "?"}
    command.add_argument(
        name,
        type=Path,
        metavar="CONFIG",
        help="stage configuration, a YAML file (default: the tiny one that runs on a CPU)",
        **optional,  # type: ignore[arg-type]
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, use a number from 1 to 65535, for example 8000")
    return int(text)


def _demo(options: argparse.Namespace) -> None:
    from omni_cluster.demo import run_demo

    run_demo(options.config, options.port, options.out)


def _check(options: argparse.Namespace) -> None:
    from omni_cluster.config.loader import load_config
    from omni_cluster.config.plan import render_plan, resolve_plan
    from omni_cluster.engine.build import check_stages
    from omni_cluster.models.registry import known_families

    config = load_config(options.config, known_families=known_families())
    check_stages(config)
    print(render_plan(resolve_plan(config)), end="")


def _make_checkpoint(options: argparse.Namespace) -> None:
    from omni_cluster.models.registry import family_class, known_families

    family = family_class(options.family or known_families()[0])
    print(family.make_checkpoint(options.preset, options.out, device=options.device, progress=print))
