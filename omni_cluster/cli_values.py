"""Numbers on the command line: each refuses what it is not in a sentence of its own."""

from __future__ import annotations

import argparse
import math


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, use a number from 1 to 65535, for example 8000")
    return int(text)


def count(text: str) -> int:
    number = whole(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is too few, use a whole number from 1, for example 16")
    return number


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, use one such as 16")
    return int(text)


def positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, use one such as 2.5")
    return number


def share(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, use a number from 0 to 1, for example 0.5")
    return number


def precision(text: str) -> float:
    number = _number(text)
    if not 0.01 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no precision, use a number from 0.01 to 1, for example 0.1")
    return number


def _number(text: str) -> float:
    """NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
