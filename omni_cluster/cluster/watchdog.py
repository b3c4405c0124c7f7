"""A replica that hangs is ended at once, and with it the processes of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from omni_cluster.cluster.watchdog_process import GOOD_BYE
from omni_cluster.types.errors import StageDied

BEAT_S = 1.0

logger = logging.getLogger("ray.serve")


class Watchdog:
    """A process of its own (`watchdog_process.py`), which ends this one when it hangs, and outlives it no longer."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long this process may go without a beat, once there was one."""
        script = str(Path(__file__).with_name("watchdog_process.py"))
        self._command = [sys.executable, "-I", "-S", script, str(os.getpid()), str(patience_s)]
        self._process = self._begun()

    def _begun(self) -> subprocess.Popen[bytes]:
        # In a session of its own: what a terminal sends to end the application is not for it.
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        return process

    def beat(self) -> None:
        """Says that this process lives. Starts another watchdog if it is gone."""
        try:
            self._say(b".")
        except BrokenPipeError:
            self._process.wait()
            self._process = self._begun()

    def close(self) -> None:
        """Ends the watch."""
        with contextlib.suppress(BrokenPipeError):
            self._say(GOOD_BYE)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _say(self, word: bytes) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(word)


async def beat_while_healthy(watchdog: Watchdog, check_health: Callable[[], Awaitable[None]]) -> None:
    """Beats until it is cancelled. Ends this process when the engine can no longer serve.

    Serve would let an unhealthy replica finish its requests, which this one never could. The end of the process is
    known at once to all callers, and to Serve, which starts another one.
    """
    while True:
        try:
            await check_health()
        except StageDied as error:
            _end_process(error)
        watchdog.beat()
        await asyncio.sleep(BEAT_S)


def _end_process(error: StageDied) -> None:
    logger.critical("this replica ends: %s", error, exc_info=error)
    for handler in logger.handlers:
        handler.flush()
    os._exit(1)
