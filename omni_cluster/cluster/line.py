"""What a link's messages travel on: a stream of Ray Serve's."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Protocol

from omni_cluster.cluster.transport import LinkItem, RemoteStage, Subscription


class Line(Protocol):
    """One way from a producing replica to its consumer."""

    def messages(self, first: Subscription) -> AsyncGenerator[list[LinkItem], None]:
        """Opens the line with its first reader; the first message is empty. Raises what broke it."""
        ...

    async def subscribe(self, subscription: Subscription) -> bool:
        """Adds a reader once the line is open; False when it has closed meanwhile."""
        ...


class ServeLine:
    """A streaming call, whose messages are Ray objects or items of Serve's gRPC, as the stage's transport says."""

    def __init__(self, source: RemoteStage, replica_id: str) -> None:
        self._source = source
        self._replica_id = replica_id
        self._name = uuid.uuid4().hex

    def messages(self, first: Subscription) -> AsyncGenerator[list[LinkItem], None]:
        return self._source.stream("link", self._name, first, replica_id=self._replica_id)

    async def subscribe(self, subscription: Subscription) -> bool:
        return bool(await self._source.call("subscribe", self._name, subscription, replica_id=self._replica_id))
