"""A request's media on their way to the entry stage: one Ray object, freed as soon as that stage has them.

Serve's own calls take 4 MiB at most. A reference outside of Ray's calls would never be freed: this one is the argument
of a call, whose end says that the stage has what it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import ray
from PIL import Image

from omni_cluster.cluster.failures import named_failures
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.inputs import OmniRequest
from omni_cluster.media import Media, Video


@dataclass(frozen=True, slots=True)
class Parcel:
    """Media as Ray stores them once and maps them: plain arrays, RGB images `[height, width, 3]` among them."""

    audios: tuple[np.ndarray, ...]
    images: tuple[np.ndarray | Image.Image, ...]
    videos: tuple[Video, ...]

    @classmethod
    def of(cls, media: Media) -> Parcel:
        return cls(media.audios, tuple(map(_as_array, media.images)), media.videos)

    def open(self) -> Media:
        """The media as they were, to the bit."""
        return Media(self.audios, tuple(map(_as_image, self.images)), self.videos)


def _as_array(image: Image.Image | np.ndarray) -> np.ndarray | Image.Image:
    return np.asarray(image) if isinstance(image, Image.Image) and image.mode == "RGB" else image


def _as_image(image: np.ndarray | Image.Image) -> Image.Image:
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


class Posted:
    """A request whose media, if it has any, lie in the object store until the entry stage has taken them."""

    def __init__(self, request: OmniRequest, media: ray.ObjectRef | None) -> None:
        self.request = request
        self._media = media
        self._taken: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()

    @property
    def has_media(self) -> bool:
        return self._media is not None

    def taken(self, ticket: Ticket) -> None:
        """The entry stage has taken the request, and waits for the media."""
        self._taken.set_result(ticket)

    async def bring_media(self, calls: RemoteStage) -> None:
        """Once the entry stage has taken the request; the object is freed when this returns."""
        ticket = await self._taken
        media, self._media = self._media, None
        await calls.call("bring", ticket.request_id, media, replica_id=ticket.replica_id, wait_s=None)


async def posted(request: OmniRequest) -> Posted:
    """Raises StoreFull when there is no room for the media."""
    if request.media == Media():
        return Posted(request, None)
    with named_failures():
        media = await asyncio.to_thread(_put, request.media)
    return Posted(request.without_media(), media)


def _put(media: Media) -> ray.ObjectRef:
    return ray.put(Parcel.of(media))


class Parcels:
    """The media of this replica's requests. A request is here before its media are sent."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[Parcel]] = {}

    @contextmanager
    def expecting(self, request_id: str) -> Iterator[None]:
        """What comes for the request is kept until it is taken, as long as the context is open."""
        self._expected[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    async def take(self, request_id: str) -> Parcel:
        """Waits for the media of a request that is expected; they lie in the store as long as the caller has them."""
        parcel = await self._expected[request_id]
        self._expected.pop(request_id, None)
        return parcel

    def bring(self, request_id: str, parcel: Parcel) -> None:
        """Keeps nothing for a request that has ended here."""
        coming = self._expected.get(request_id)
        if coming is not None and not coming.done():
            coming.set_result(parcel)
