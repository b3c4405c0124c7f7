"""The commands that ask a server from a terminal: `chat` and `top`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from omni_cluster.cli_values import positive


def add_chat(commands: argparse._SubParsersAction[Any]) -> None:
    command = commands.add_parser("chat", help="talk to a server: type, attach files, read and hear its answers")
    _add_server(command)
    command.add_argument("--voice", metavar="NAME", help="(default: the server's)")
    command.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    command.add_argument("--text", action="store_true", help="answers without sound")
    command.add_argument(
        "--save", type=Path, metavar="DIR", help="folder of the answers' sound (default: it is played)"
    )
    command.set_defaults(run=_chat)


def add_top(commands: argparse._SubParsersAction[Any]) -> None:
    command = commands.add_parser("top", help="show what a server's stages do, as it changes")
    _add_server(command)
    command.add_argument("--every", type=positive, default=2.0, metavar="S", help="seconds of a view (default: 2)")
    command.add_argument("--once", action="store_true", help="print one view and exit")
    command.set_defaults(run=_top)


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    command.add_argument("--key-file", type=Path, metavar="FILE", help="file with an API key, where the server asks")


def _chat(options: argparse.Namespace) -> None:
    from omni_cluster.terminal.chat import ChatOptions, run_chat

    run_chat(ChatOptions(options.url, options.key_file, options.voice, options.system, not options.text, options.save))


def _top(options: argparse.Namespace) -> None:
    from omni_cluster.terminal.top import run_top

    run_top(options.url, options.key_file, options.every, options.once)
