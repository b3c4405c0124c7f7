"""Where the processes of engines come from: from one that imports vLLM while the replica does, not after it.

vLLM starts an engine's process when the replica has imported vLLM, and that process imports it again, which takes some
twenty seconds. A fork of a process that has done so has nothing to import. That process is Python's own fork server: it
has no thread of the replica's, answers to it alone, and never uses the card: a fork could not use it then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import (
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from multiprocessing.process import BaseProcess
from typing import Any

from omni_cluster.vllm_engine.install import replaced
from omni_cluster.vllm_engine.known_warnings import drop_known_warnings

PRELOADED = "omni_cluster.vllm_engine.preloaded"
_PR_SET_PDEATHSIG = 1


class ForkedProcess(ForkServerProcess):
    """A process with the environment that this one has when it starts it, as any other child has."""

    _environment: Mapping[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        _die_with_server()
        _die_with_starter()
        _change_environment(self._environment)
        super().run()


class ForkedContext(ForkServerContext):
    """What vLLM asks for processes."""

    Process = ForkedProcess  # type: ignore[assignment]


class _EndsWithStarter(BaseProcess):
    """A process that ends when the one that started it does, however that ends."""

    def run(self) -> None:
        _die_with_starter()
        drop_known_warnings()
        super().run()


class SpawnedProcess(_EndsWithStarter, SpawnProcess):
    """One that begins anew."""


class SpawnedContext(SpawnContext):
    """What vLLM asks for processes that begin anew."""

    Process = SpawnedProcess  # type: ignore[assignment]


class CopiedProcess(_EndsWithStarter, ForkProcess):
    """A copy of the one that starts it."""


class CopiedContext(ForkContext):
    """What vLLM asks for copies of this process."""

    Process = CopiedProcess  # type: ignore[assignment]


class EngineProcesses:
    """How this process starts those of its engine: by a fork once `import_beside` was called, else in vLLM's way."""

    def __init__(self) -> None:
        self._context: ForkedContext | None = None

    def import_beside(self, preloaded: str = PRELOADED) -> None:
        """Starts the process that engines are forked from, which imports what they need. Returns at once."""
        _track_apart()
        multiprocessing.set_forkserver_preload([preloaded])
        forkserver.ensure_running()
        self._context = ForkedContext()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Engines that vLLM constructs inside start their processes so."""
        from vllm.v1.engine import utils
        from vllm.v1.executor import multiproc_executor

        own = {"spawn": SpawnedContext, "fork": CopiedContext}
        context = self._context or own[utils.get_mp_context().get_start_method()]()
        with (
            replaced(utils, "get_mp_context", lambda: context),
            replaced(multiproc_executor, "get_mp_context", lambda: context),
        ):
            yield


ENGINE_PROCESSES = EngineProcesses()
"""Of this process, which has one fork server at most."""


def _track_apart() -> None:
    """Starts Python's resource tracker, which frees what killed processes shared, in a session of its own.

    Ray kills the group of a replica that is gone, and the tracker would go with it.
    """
    spawn = util.spawnv_passfds

    def spawn_apart(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        *options, command = arguments
        return spawn(path, [*options, f"import os;os.setsid();{command}"], fds)

    with replaced(util, "spawnv_passfds", spawn_apart):
        resource_tracker.ensure_running()


def _change_environment(wanted: Mapping[str, str]) -> None:
    """Only what differs: the name of a process is written over variables that are where they were at its beginning."""
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _die_with_server() -> None:
    """The kernel ends this process when the fork server ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_starter() -> None:
    """This process ends when the one that asked for it does, which need not be its parent: a fork server ends too."""
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(target=_kill_this_after, args=(starter.sentinel,), daemon=True).start()


def _kill_this_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
