"""The way of a stranger: README's own commands in a fresh clone, until the server answers by text, and is heard.

    python -m tests.stranger [--text-s 240] [--sound-s 10]

The clone has an environment and a home of its own, so nothing that was installed or cached before is found. Prints what
each command took and each warning that was on the screen; the exit status is 0 where all was in time and without one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.terminal import CTRL_C, WARNS, Terminal, on_terminal

ROOT = Path(__file__).parents[1]
BASE_URL = "http://127.0.0.1:8000"
PATIENCE_S = 1800
END_S = 60
INSTALLS = re.compile(r"^(PATH|LANG|TMPDIR|(UV|PIP)_\w+|SSL_\w+|\w+_proxy|\w+_PROXY)$")
"""Of the environment: how this machine reaches a package registry."""


@dataclass(frozen=True, slots=True)
class Commands:
    """README's commands, in their order. `ask` answers by text, and `listen`, a Python program, with sound."""

    install: str
    serve: str
    ask: str
    listen: str

    @classmethod
    def of(cls, readme: str) -> Commands:
        """Raises ValueError for a README without one of them."""
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        install, serve = _lines(_first(blocks, "bash", "serve run"))
        return cls(install, serve, _first(blocks, "bash", "curl").strip(), _first(blocks, "python", "audio"))


def _first(blocks: list[tuple[str, str]], language: str, word: str) -> str:
    for kind, text in blocks:
        if kind == language and word in text:
            return text
    raise ValueError(f"README has no block of {language or 'commands'} with {word!r}.")


def _lines(block: str) -> list[str]:
    """The commands of a block, without what is said of them."""
    return [shlex.join(words) for line in block.splitlines() if (words := shlex.split(line, comments=True))]


class Stranger:
    """Commands typed in a clone, one after another; `warnings` are lines that the screen showed."""

    def __init__(self, clone: Path, environment: Mapping[str, str]) -> None:
        self._clone, self._environment = clone, environment
        self.warnings: list[str] = []

    def run(self, command: str) -> str:
        """What it printed. Raises CalledProcessError."""
        with self.typed(command) as terminal:
            status = terminal.end(PATIENCE_S)
        printed = "\n".join(terminal.lines)
        if status != 0:
            raise subprocess.CalledProcessError(status, command, printed)
        return printed

    @contextmanager
    def typed(self, command: str) -> Iterator[Terminal]:
        with on_terminal(["sh", "-c", f"exec {command}"], self._clone, self._environment) as terminal:
            yield terminal
            self.warnings += [line for line in terminal.lines if WARNS.search(line)]


def is_ready() -> bool:
    try:
        return httpx.get(f"{BASE_URL}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def walk(clone: Path, environment: Mapping[str, str]) -> tuple[float, float, list[str]]:
    """Seconds until an answer by text, from there until one with sound, and the warnings."""
    commands, stranger = Commands.of((clone / "README.md").read_text()), Stranger(clone, environment)
    began_s = time.monotonic()

    def tell(what: str) -> float:
        now_s = time.monotonic() - began_s
        print(f"{now_s:6.1f} s  {what}", flush=True)
        return now_s

    stranger.run(commands.install)
    tell(commands.install)
    with stranger.typed(commands.serve) as server:
        server.until(is_ready, PATIENCE_S)
        tell(commands.serve)
        answer = stranger.run(commands.ask)
        text_s = tell(f"text: {said(answer)!r}")
        (clone / "listen.py").write_text(commands.listen)
        stranger.run(".venv/bin/python listen.py")
        sound_s = tell(f"sound: {(clone / 'answer.wav').stat().st_size} bytes") - text_s
        server.press(CTRL_C)
        server.end(END_S)
        tell("Ctrl-C")
    return text_s, sound_s, stranger.warnings


def said(printed: str) -> str:
    """The text of an answer; `curl` may print its progress before it."""
    return str(json.loads(printed[printed.index('{"') :])["choices"][0]["message"]["content"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-s", type=float, default=240.0, help="to the first answer by text (default: 240)")
    parser.add_argument("--sound-s", type=float, default=10.0, help="from there to the first sound (default: 10)")
    parser.add_argument("--home", type=Path, help="whose caches are used (default: an empty one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "clone", options.home or Path(folder) / "home"
        home.mkdir(exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if INSTALLS.match(name)} | {"HOME": str(home)}
        text_s, sound_s, warned = walk(clone, environment)
    for line in warned:
        print(f"warning: {line}")
    print(f"text after {text_s:.0f} s (at most {options.text_s:g}), sound {sound_s:.1f} s later ({options.sound_s:g})")
    return int(bool(warned) or text_s > options.text_s or sound_s > options.sound_s)


if __name__ == "__main__":
    sys.exit(main())
