"""The commands that ask a server from a terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from omni_cluster.cli_values import positive


def add_top(commands: argparse._SubParsersAction[Any]) -> None:
    command = commands.add_parser("top", help="show what a server's stages do, as it changes")
    _add_server(command)
    command.add_argument("--every", type=positive, default=2.0, metavar="S", help="seconds of a view (default: 2)")
    command.add_argument("--once", action="store_true", help="print one view and exit")
    command.set_defaults(run=_top)


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    command.add_argument("--key-file", type=Path, metavar="FILE", help="file with an API key, where the server asks")


def _top(options: argparse.Namespace) -> None:
    from omni_cluster.terminal.top import run_top

    run_top(options.url, options.key_file, options.every, options.once)
