"""Inputs that break what takes them: what a run says of them."""

from __future__ import annotations

import os
import signal
from random import Random

from tests.fuzz.driver import Kind


def _divide(data: bytes) -> None:
    print(1 / (data[0] - data[0]))


def _die(data: bytes) -> None:
    if data[0] % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _two(rng: Random) -> bytes:
    return rng.randbytes(2)


KINDS = {"broken": Kind(_two, _divide, (ValueError,), 1), "deadly": Kind(_two, _die, (ValueError,), 1)}
