"""A process of a batch over real HTTP: its threads, its first words and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest
import uvicorn
from starlette.responses import JSONResponse

from omni_cluster.batch.errors import ApplicationLost
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.sources import Application
from omni_cluster.batch.worker import Answering
from omni_cluster.serve_local import listening
from tests.batch.scripted import ANSWER, LIMITS, Scripted, row


@pytest.fixture
def address() -> Iterator[str]:
    """Of a scripted application, in a thread of its own."""
    server = uvicorn.Server(uvicorn.Config(Scripted(lambda _: JSONResponse(ANSWER)), lifespan="off", log_level="error"))
    with listening("127.0.0.1", 0) as listener:
        serves = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        serves.start()
        yield "http://{}:{}".format(*listener.getsockname())
        server.should_exit = True
        serves.join()


def table(*ids: str) -> pyarrow.Table:
    return pyarrow.Table.from_pylist([row(each) for each in ids])


def test_blocks_are_answered_from_several_threads(address: str) -> None:
    answering = Answering(Application(url=address), LIMITS)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(answering, [table("a", "b"), table("c")])
    assert (first["id"].to_pylist(), second["id"].to_pylist()) == (["a", "b"], ["c"])
    answering.close()


def test_a_source_that_is_not_there_is_told_by_the_first_block_and_the_thread_ends_with_the_process() -> None:
    before = set(threading.enumerate())
    answering = Answering(Application(url="http://127.0.0.1:9"), BatchLimits(patience_s=0.1))
    with pytest.raises(ApplicationLost, match="start the batch again"):
        answering(table("a"))
    answering.close()
    answering.close()
    assert not set(threading.enumerate()) - before
