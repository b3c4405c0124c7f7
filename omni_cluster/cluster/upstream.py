"""What a stage's consumer reads: the chunks of one request, pulled from the replica that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from omni_cluster.cluster.transport import BulkChunk, RemoteStage, Ticket
from omni_cluster.outputs import StageChunk


async def pull(source: RemoteStage, ticket: Ticket, max_elements: int) -> AsyncGenerator[StageChunk, None]:
    """All chunks of the request, from the first on, as a stream of small items.

    A chunk too large for one (a long prompt's rows) is named in the stream and fetched as one Ray object of its own.
    Raises what the producer raised, and ray.exceptions.RayActorError when its replica died.
    """
    items = source.stream("chunks", ticket.request_id, replica_id=ticket.replica_id)
    async with contextlib.aclosing(items):
        async for item in items:
            if isinstance(item, BulkChunk):
                item = await source.call("chunk", ticket.request_id, item.number, replica_id=ticket.replica_id)
            yield item.open(max_elements)
