"""Calls between replicas: the only place that touches what Ray Serve does not promise to keep."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.address_router import ADDRESS_PREFIX
from omni_cluster.errors import OmniError
from omni_cluster.outputs import StageChunk
from omni_cluster.payloads import RowsChunk

Transport = Literal["object", "grpc"]

ROUTER = RequestRouterConfig(request_router_class="omni_cluster.cluster.address_router.AddressRouter")

# Objects in the store are read where they lie, and must not be written to; nothing here writes to rows.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a stage keeps what it makes of a request: the replica that a consumer must pull from."""

    request_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class WireChunk:
    """A StageChunk as it travels: its rows as plain bytes, which Ray stores once and maps without copying.

    torch's own pickling of bfloat16 copies; packed rows as a NumPy array do not.
    """

    chunk: StageChunk
    packed_rows: np.ndarray | None

    @classmethod
    def of(cls, chunk: StageChunk) -> WireChunk:
        packed = None if chunk.rows is None else chunk.rows.pack().numpy()
        return cls(chunk.without_rows(), packed)

    def open(self, max_elements: int) -> StageChunk:
        if self.packed_rows is None:
            return self.chunk
        return self.chunk.with_rows(RowsChunk.unpack(torch.from_numpy(self.packed_rows), max_elements=max_elements))


@dataclass(frozen=True, slots=True)
class BulkChunk:
    """In place of chunk `number` of a request, which is too large for a streamed item: to be fetched by itself."""

    number: int


@dataclass(frozen=True, slots=True)
class Subscription:
    """One reader's wish for all chunks of a request. `reader`: a number that the consumer gives each of its own."""

    reader: int
    request_id: str
    with_rows: bool


@dataclass(frozen=True, slots=True)
class LinkItem:
    """What one reader is sent. No body: the end, and what broke if something did."""

    reader: int
    body: WireChunk | BulkChunk | None
    error: Exception | None = None


def own_replica_id() -> str:
    """The id by which other replicas can address this one."""
    return cast(str, serve.get_replica_context().replica_id.unique_id)


class RemoteStage:
    """The replicas of one stage, as another deployment calls them."""

    def __init__(self, handle: DeploymentHandle, transport: Transport) -> None:
        self._by_reference = transport == "object"
        self._unary = handle
        self._stream = handle.options(stream=True, _by_reference=self._by_reference)

    async def stream(self, method: str, *args: Any, replica_id: str = "") -> AsyncGenerator[Any, None]:
        """Items of a streaming method; closing it ends the call over there."""
        handle = self._stream.options(session_id=ADDRESS_PREFIX + replica_id) if replica_id else self._stream
        items = getattr(handle, method).remote(*args)
        try:
            async for item in items:
                yield item
        except RayTaskError as error:
            raise _cause(error) from None
        finally:
            items.cancel()  # dropping a response does not stop its producer

    async def call(self, method: str, *args: Any, replica_id: str) -> Any:
        """One result, by reference: a large one is read from the object store where it lies."""
        try:
            return await getattr(self._unary.options(session_id=ADDRESS_PREFIX + replica_id), method).remote(*args)
        except RayTaskError as error:
            raise _cause(error) from None


def _cause(error: RayTaskError) -> Exception:
    """What the other replica raised, without Ray's report around it."""
    return error.cause if isinstance(error.cause, OmniError) else error
