"""Engines that are forked from a process which imported vLLM beside their replica."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.engine.stages import MAX_TOKENS
from tests.processes import running_after
from tests.reference import Reference, prompt_text

ROOT = Path(__file__).parents[2]
GONE_S = 60
CHILD = """
import os, time
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=64)
print(os.environ["SET_LATER"], os.getpid(), os.getppid(), held.name, flush=True)
time.sleep(600)
"""
REPLICA = f"""
import os, time
from omni_cluster.vllm_engine.engine_processes import EngineProcesses, ForkedContext

if __name__ == "__main__":
    EngineProcesses().import_beside("wave")
    os.environ["SET_LATER"] = "later"
    ForkedContext().Process(target=exec, args=({CHILD!r},)).start()
    time.sleep(600)
"""
EMBEDDED = f"""
import time
from omni_cluster.vllm_engine.engine_processes import SpawnedContext

if __name__ == "__main__":
    SpawnedContext().Process(target=exec, args=({CHILD!r},)).start()
    time.sleep(600)
"""
ENGINE = f"""
import asyncio, json, os, sys
import psutil
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES
from tests.engine.stages import pipeline_config, running
from tests.processes import command_line, running_after

async def main():
    ENGINE_PROCESSES.import_beside()
    async with running(pipeline_config(), "thinker") as stage:
        started = psutil.Process().children(recursive=True)
        engines = [each for each in started if command_line(each).startswith("VLLM::EngineCore")]
        forked = [engine.ppid() != os.getpid() for engine in engines]
        request = OmniRequest("one", sys.argv[1], wants_audio=False)
        tokens = [t async for chunk in stage.generate(request) for t in chunk.token_ids]
    left = running_after(engines, {GONE_S})
    print(json.dumps({{"forked": forked, "left": len(left), "tokens": tokens}}))

if __name__ == "__main__":
    asyncio.run(main())
"""


class Replica(NamedTuple):
    """A process without a watchdog, its fork server, what that forked, and the file of the memory that this shares."""

    own: psutil.Process
    server: psutil.Process
    forked: psutil.Process
    shared: Path


@contextmanager
def replica() -> Iterator[Replica]:
    """In a group of its own, as Ray starts them."""
    process = subprocess.Popen(
        [sys.executable, "-c", REPLICA], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        variable, pid, server, shared = process.stdout.readline().split()
        assert variable == "later"
        own, forked = psutil.Process(process.pid), psutil.Process(int(pid))
        assert forked.ppid() == int(server) != process.pid
        assert psutil.Process(int(server)).ppid() == process.pid
        yield Replica(own, psutil.Process(int(server)), forked, Path("/dev/shm") / shared)
    finally:
        process.kill()
        process.communicate()


def ended(processes: list[psutil.Process]) -> bool:
    return not running_after(processes, GONE_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_nothing_outlives_a_replica(how: signal.Signals) -> None:
    with replica() as running:
        running.own.send_signal(how)
        assert ended([running.server, running.forked])


def test_no_shared_memory_outlives_a_replica_that_is_killed_with_its_group() -> None:
    """As Ray does with whatever a worker that is gone has started."""
    with replica() as running:
        started = running.own.children(recursive=True)
        assert running.shared.exists()
        os.killpg(running.own.pid, signal.SIGKILL)
        assert ended([running.own, *started]) and not running.shared.exists()


def test_an_engine_does_not_outlive_the_process_that_it_was_forked_from() -> None:
    with replica() as running:
        running.server.kill()
        assert ended([running.forked])


def test_an_engine_does_not_outlive_a_process_that_embeds_it_and_is_killed(tmp_path: Path) -> None:
    """A spawned process reads the file of its starter."""
    (tmp_path / "embedded.py").write_text(EMBEDDED)
    variables = {**os.environ, "SET_LATER": "before", "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, str(tmp_path / "embedded.py")], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        _, pid, parent, _ = starter.stdout.readline().split()
        spawned = psutil.Process(int(pid))
        assert int(parent) == starter.pid
        starter.kill()
        assert ended([spawned])
    finally:
        starter.kill()
        starter.communicate()


@pytest.mark.full
def test_a_forked_engine_equals_the_reference_and_ends(reference: Reference) -> None:
    prompt = prompt_text("text")
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, prompt], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (told["forked"], told["left"]) == ([True], 0)
    assert told["tokens"] == reference.thinker(prompt, max_new_tokens=MAX_TOKENS).token_ids
