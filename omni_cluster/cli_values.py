"""What the commands share: numbers, each of which refuses what it is not in a sentence of its own, and options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omni_cluster.types.errors import OmniError


class UsageError(OmniError):
    """A command line that names no command, or one with arguments that do not fit."""


def _number(fits: Callable[[float], bool], wish: str, read: Callable[[str], float] = float) -> Callable[[str], Any]:
    """A `type` of argparse. NaN, which fits nothing, stands for what is no number."""

    def checked(text: str) -> float:
        try:
            number = read(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"{text!r} is {wish}")
        return number

    return checked


def _digits(text: str) -> int:
    """Without signs, spaces and underscores, which `int` reads."""
    return int(text) if text.isascii() and text.isdigit() else int("")


port = _number(lambda n: 1 <= n <= 65_535, "no port, use a number from 1 to 65535, for example 8000", _digits)
whole = _number(lambda n: n >= 0, "no whole number, use one such as 16", _digits)
count = _number(lambda n: n >= 1, "no whole number from 1, use one such as 16", _digits)
positive = _number(lambda n: 0 < n < math.inf, "no number above 0, use one such as 2.5")
share = _number(lambda n: 0 <= n <= 1, "no share, use a number from 0 to 1, for example 0.5")
precision = _number(lambda n: 0.01 <= n <= 1, "no precision, use a number from 0.01 to 1, for example 0.1")


def add_config(command: argparse._ActionsContainer, name: str) -> None:
    optional = {} if name.startswith("-") else {"nargs": "?"}
    command.add_argument(
        name,
        type=Path,
        metavar="CONFIG",
        help="stage configuration, a YAML file (default: the trained toy's, which runs on a CPU)",
        **optional,  # type: ignore[arg-type]
    )


def check_ranges(options: argparse.Namespace, ranges: Sequence[str]) -> None:
    """Raises UsageError for a range whose higher end comes first."""
    for option in ranges:
        low, high = _value(options, option) or (0, 0)
        if low > high:
            raise UsageError(f"{option} is {low:g} {high:g}; name the lower one first.")


def said(options: argparse.Namespace, option: str) -> bool:
    value = _value(options, option)
    return value is not None and value is not False and value != []


def _value(options: argparse.Namespace, option: str) -> Any:
    return getattr(options, option.removeprefix("--").replace("-", "_"))
