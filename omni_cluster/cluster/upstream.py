"""What a stage's consumer reads: the chunks of one request, pulled from the replica that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from omni_cluster.cluster.transport import RemoteStage, Ticket, WireChunk
from omni_cluster.outputs import StageChunk


async def pull(
    source: RemoteStage, ticket: Ticket, max_elements: int, *, bulk_first: bool
) -> AsyncGenerator[StageChunk, None]:
    """All chunks of the request, from the first on.

    `bulk_first`: the first chunk (a whole prompt's rows) comes as one Ray object of its own; what follows is a stream
    of small items. Raises what the producer raised, and ray.exceptions.RayActorError when its replica died.
    """
    next_chunk = 0
    if bulk_first:
        first: WireChunk = await source.call("first_chunk", ticket.request_id, replica_id=ticket.replica_id)
        yield first.open(max_elements)
        next_chunk = 1
    items = source.stream("chunks", ticket.request_id, next_chunk, replica_id=ticket.replica_id)
    async with contextlib.aclosing(items):
        async for item in items:
            yield item.open(max_elements)
