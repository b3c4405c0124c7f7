"""A request's media on their way to the entry stage: with the request, or as one Ray object, kept until it ends.

Serve's own calls take 4 MiB at most, so that larger media become an object. That takes a call more, 10 ms of a prompt's
way. A reference that travelled outside of Ray's calls would never be freed: this one is the argument of a call, again
in each run of the request.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import ray

from omni_cluster.cluster.failures import named_failures
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.types.errors import without_frames
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.media import Media

MAX_CARRIED_BYTES = 2 << 20
"""Of media that travel with their request: half a minute of sound, or a picture of 800 x 600."""


class StagedRequest:
    """A request, and its media, which are carried beside it or lie in the object store."""

    def __init__(self, request: OmniRequest, media: ray.ObjectRef | None = None, carried: Media | None = None) -> None:
        self.request = request
        self._media = media
        self._carried = carried

    @property
    def has_stored_media(self) -> bool:
        return self._media is not None

    def with_carried_media(self, request: OmniRequest) -> OmniRequest:
        """For the entry stage, a run of this request."""
        return request if self._carried is None else replace(request, media=self._carried)

    async def bring_media(self, calls: RemoteStage, ticket: Ticket) -> None:
        """To the replica of the entry stage that has given the ticket, and waits for them."""
        try:
            await calls.call("bring", ticket.request_id, self._media, replica_id=ticket.replica_id, wait_s=None)
        except Exception as error:
            raise without_frames(error) from None  # which have the reference, and are kept longer than the request

    def drop_media(self) -> None:
        """The request has ended. Whoever holds this longer, as an error's frames do, holds no media."""
        self._media = self._carried = None


@asynccontextmanager
async def staged(request: OmniRequest) -> AsyncIterator[StagedRequest]:
    """The request; its media are there as long as the context is open. Raises StoreFull."""
    sent = await _staged(request)
    del request  # its media are not with it any more
    try:
        yield sent
    finally:
        sent.drop_media()


async def _staged(request: OmniRequest) -> StagedRequest:
    if request.media.size_bytes <= MAX_CARRIED_BYTES:
        # A copy: as long as what a decoder made is in use, it counts against what may be decoded for others.
        return StagedRequest(request.without_media(), carried=copy.deepcopy(request.media))
    with named_failures():
        media = await asyncio.to_thread(lambda: ray.put(request.media.as_arrays()))
    return StagedRequest(request.without_media(), media)


class IncomingMedia:
    """The media of this replica's requests. A request is here before its media are sent."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[Media]] = {}

    @contextmanager
    def expecting(self, request_id: str) -> Iterator[None]:
        """What comes for the request is kept until it is taken, as long as the context is open."""
        self._expected[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    async def take(self, request_id: str) -> Media:
        """Waits for the media of a request that is expected; they lie in the store as long as the caller has them."""
        media = await self._expected[request_id]
        self._expected.pop(request_id, None)
        return media

    def bring(self, request_id: str, media: Media) -> None:
        """Keeps nothing for a request that has ended here."""
        coming = self._expected.get(request_id)
        if coming is not None and not coming.done():
            coming.set_result(media)
