"""The HTTP API over a pipeline in this process: no Ray, one event loop, for development."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import uvicorn

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.engine.pipeline import Pipeline
from omni_cluster.server.app import HttpServer
from omni_cluster.server.http_protocol import HttpProtocol
from omni_cluster.types.errors import OmniError

LAST_ANSWERS_S = 5
"""How long requests that run may take when the server is to end."""
BACKLOG = 2048


class AddressTaken(OmniError):
    """An address that this process cannot listen on: names it, and says why."""


def run_server(config: Path | None, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT, which is KeyboardInterrupt.

    Raises ConfigError for the configuration and AddressTaken, both before an engine is started.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    omni = AsyncOmniLLM(config)
    with listening(host, port) as listener, contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(omni, listener))


async def _serve(omni: AsyncOmniLLM, listener: socket.socket) -> None:
    with cancelled_by_sigterm():
        try:
            await omni.start()
            async with serving(omni, listener) as server:
                print(f"omni_cluster serves {server.url} from this process.", flush=True)
                await server.ended()
        finally:
            await omni.shutdown()


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens; port 0: one that is free. Raises AddressTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise AddressTaken(
            f"cannot listen on {host} port {port} ({reason}); choose another --host or --port."
        ) from None
    with listener:
        yield listener


@contextlib.asynccontextmanager
async def serving(pipeline: Pipeline, listener: socket.socket) -> AsyncIterator[Serving]:
    """Serves the API as long as the context is open. The pipeline runs in the same event loop."""
    http = HttpServer(pipeline)
    # A request's line in the log is the HTTP face's own.
    server = _Server(
        uvicorn.Config(
            http.app(),
            http=HttpProtocol,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
        )
    )
    served = Serving(asyncio.create_task(server.serve(sockets=[listener])), listener)
    standing_by = asyncio.create_task(http.stand_by())
    try:
        yield served
    finally:
        server.should_exit = True
        try:
            await served.ended()
        finally:
            standing_by.cancel()
            await asyncio.wait([standing_by])
            await http.close()
        if not standing_by.cancelled():
            standing_by.result()


class Serving:
    """A server that runs as a task."""

    def __init__(self, task: asyncio.Task[None], listener: socket.socket) -> None:
        self._task = task
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def ended(self) -> None:
        """Returns when it serves no more. Raises what broke it; cancelling the call leaves it running."""
        await asyncio.shield(self._task)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the caller."""
        yield


@contextlib.contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM cancels the task that is inside, as asyncio has it for SIGINT."""
    task, loop = cast(asyncio.Task[None], asyncio.current_task()), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
