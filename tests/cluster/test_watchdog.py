"""The watchdog beside real processes: a replica's stand-in, which beats and has a child, and what happens to both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from omni_cluster.cluster import watchdog_process
from omni_cluster.cluster.watchdog_process import STOPPED_S, TICK_S, Watch
from tests.processes import kill, running_after

PATIENCE_S = 60.0
NOTICED_S = 15.0
"""Until a process that is stopped is noticed, at the latest."""
FOR_EVER = 1e6

REPLICA = """
    import array, asyncio, fcntl, multiprocessing, subprocess, sys, termios, time
    from omni_cluster.cluster.watchdog import Watchdog, beat_while_healthy
    from omni_cluster.types.errors import StageDied

    beats, is_watched = 0, False

    async def check_health():
        global beats
        beats += 1
        {check}

    async def until_watched(watchdog):
        for _ in range(2):  # whoever reads the second beat has looked after the first
            watchdog.beat()
            unread = array.array("i", [1])
            while unread[0]:
                await asyncio.sleep(0.01)
                fcntl.ioctl(watchdog._process.stdin, termios.FIONREAD, unread)
        global is_watched
        is_watched = True

    async def main():
        watchdog = Watchdog({patience_s})
        engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print(engine.pid, watchdog._process.pid, flush=True)
        beating = asyncio.create_task(beat_while_healthy(watchdog, check_health))
        {then}

    asyncio.run(main())
"""


class Replica:
    """The stand-in, its child, its watchdog."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.process = process
        self.output = process.stdout
        engine, watchdog = (int(word) for word in self.output.readline().split())
        self.engine, self.watchdog = psutil.Process(engine), psutil.Process(watchdog)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def all_end(self) -> bool:
        self.process.wait(timeout=PATIENCE_S)
        return not running_after([self.engine, self.watchdog], PATIENCE_S)


@contextmanager
def replica(check: str = "pass", then: str = "await beating", patience_s: float = FOR_EVER) -> Iterator[Replica]:
    code = textwrap.dedent(REPLICA).format(check=check, then=then, patience_s=patience_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        running = Replica(process)
        try:
            yield running
        finally:
            process.kill()
            for each in (running.engine, running.watchdog):
                kill(each)


def test_what_a_killed_replica_started_is_gone_with_it() -> None:
    with replica(then="print(await until_watched(watchdog), flush=True); await beating") as running:
        running.output.readline()
        os.kill(running.process.pid, signal.SIGKILL)
        assert running.all_end()


@pytest.mark.full
@pytest.mark.parametrize("whom", ["engine", "replica"])
def test_a_process_that_is_stopped_ends_the_replica_and_its_engine(whom: str) -> None:
    with replica() as running:
        os.kill(running.engine.pid if whom == "engine" else running.process.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert running.all_end() and running.process.returncode == -signal.SIGKILL
        assert time.monotonic() - stopped_s >= STOPPED_S / 2
        assert "it or an engine of it has been stopped for" in running.errors()


def test_a_process_that_is_stopped_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped for a moment is not. Time is the watchdog's own, a look a tick."""
    killed: list[int] = []
    states = ["T"] * 3 + ["S"] + ["T"] * int(NOTICED_S / TICK_S)
    monkeypatch.setattr(watchdog_process, "kill", killed.append)
    monkeypatch.setattr(watchdog_process, "descendants", lambda _: iter(()))
    monkeypatch.setattr(watchdog_process, "state", lambda _: states[0])
    watch, looks = Watch(7, PATIENCE_S), 0
    while not killed:
        watch._look(is_silent=False, lapse_s=TICK_S)
        states.pop(0)
        looks += 1
    assert killed == [7] and looks - 4 > STOPPED_S / TICK_S


def test_a_replica_whose_loop_hangs_is_ended() -> None:
    with replica(then="await until_watched(watchdog); time.sleep(1000)", patience_s=2) as running:
        assert running.all_end() and running.process.returncode == -signal.SIGKILL
        assert "it has given no sign of life for" in running.errors()


def test_a_replica_whose_engine_died_ends_itself_and_says_why() -> None:
    died = "if is_watched: raise StageDied('the engine of stage talker died')"
    with replica(check=died, then="await until_watched(watchdog); await beating") as running:
        assert running.all_end() and running.process.returncode == 1
        assert "this replica ends: the engine of stage talker died" in running.errors()


def test_an_orderly_end_leaves_what_the_replica_started_to_it() -> None:
    then = "await until_watched(watchdog); watchdog.close(); print(watchdog._process.wait(), flush=True); await beating"
    with replica(then=then) as running:
        assert running.output.readline() == "0\n"
        assert running.engine.is_running() and running.process.poll() is None


def test_a_watchdog_that_is_gone_has_a_successor() -> None:
    then = """
        for before in [watchdog._process]:
            while watchdog._process is before:
                await asyncio.sleep(0.1)
        print(watchdog._process.pid, flush=True)
        await beating"""
    with replica(then=textwrap.indent(textwrap.dedent(then), "    ").lstrip()) as running:
        os.kill(running.watchdog.pid, signal.SIGKILL)
        running.watchdog = psutil.Process(int(running.output.readline()))
        os.kill(running.process.pid, signal.SIGKILL)
        assert not running_after([running.watchdog], PATIENCE_S)
