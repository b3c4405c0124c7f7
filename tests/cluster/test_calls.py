"""Calls of replicas, as Serve knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve.context import _get_serve_request_context, _set_request_context

from omni_cluster.cluster.transport import MAX_VALUE_BYTES, RemoteStage

SEPARATE = SimpleNamespace(_source=None, _run_router_in_separate_loop=True)


class Answer:
    """Of a call that says nothing."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()

    async def __aiter__(self) -> AsyncIterator[None]:
        for nothing in ():
            yield nothing

    def cancel(self) -> None:
        pass


class Handle:
    """Serve's handle of a deployment, without the deployment. `made`: what Serve keeps of each call."""

    app_name = "an-app"
    deployment_name = "a-called-stage"

    def __init__(self) -> None:
        self.made: list[RequestMetadata] = []
        self.awake = self.address = self.generate = self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Answer:
        self.made.append(get_request_metadata(SEPARATE, DynamicHandleOptions()))
        return Answer()


async def calls_of_each_kind(stage: RemoteStage) -> None:
    await stage.wake()
    await stage.call("address", replica_id="a")
    for argument in (b"small", bytes(MAX_VALUE_BYTES)):
        assert [item async for item in stage.stream("generate", argument, replica_id="a")] == []


@pytest.mark.parametrize("parent", ["a-parent", ""])
async def test_serve_does_not_end_calls_with_the_request_that_makes_them_and_logs_have_its_id(parent: str) -> None:
    """What Serve cancels with a request are the calls that have its internal id."""
    _set_request_context(request_id="a-request", _internal_request_id=parent)
    handle: Any = Handle()
    await calls_of_each_kind(RemoteStage(handle))
    assert [made.request_id for made in handle.made] == ["a-request"] * 4
    ids = {made.internal_request_id for made in handle.made}
    assert len(ids) == 4 and parent not in ids
    assert _get_serve_request_context()._internal_request_id == parent
