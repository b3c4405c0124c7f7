"""Routers of Ray Serve: of the stages, by a replica's id; of the ingress, by its requests. Serve sends them by value.

The one of the ingress runs in Serve's proxy, and so it counts there what clients do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from typing import Any

from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter, RunningReplica

from omni_cluster.cluster.serve_private import ReplicaID
from omni_cluster.cluster.transport import ADDRESS_PREFIX, set_running
from omni_cluster.cluster.unread import CountedReplica, Unread
from omni_cluster.server import http_protocol

MOST_GONE = 1000
"""Replicas that are gone whose ids are remembered."""
LISTING_S = 2.0
"""How long a call waits for a replica that is not listed yet: processes learn at different times of a new one."""


class AddressRouter(LocalityMixin, RequestRouter):
    """A session id "@<replica id>" names the replica; calls without one go to all replicas in turn.

    In turn, and not to the less busy of two: what a caller knows of queue lengths is seconds old, so all of a burst
    would go to one replica while another is idle. A replica that is full is passed over.

    A call whose replica is gone fails with ReplicaUnavailableError. Serve's own matching goes by the id of the parent
    request, which calls of one HTTP request may share: two calls of one request to one deployment could take each
    other's replica, or hang. Here a call is known by its own metadata object.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_by_metadata: dict[int, PendingRequest] = {}
        self._turn = 0
        self._gone: deque[str] = deque(maxlen=MOST_GONE)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        self._gone.extend(each.unique_id for each in before - set(self.curr_replicas))
        self._publish_running()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._gone.append(replica_id.unique_id)
        self._publish_running()

    def _publish_running(self) -> None:
        deployment = self._deployment_id
        nodes = {replica_id.unique_id: replica.node_id or "" for replica_id, replica in self.curr_replicas.items()}
        set_running(deployment.app_name, deployment.name, nodes)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.future.done():
            return [candidate_replicas]
        self._pending_by_metadata[id(pending_request.metadata)] = pending_request
        pending_request.routing_context.should_backoff = True
        address = pending_request.metadata.session_id
        if not address.startswith(ADDRESS_PREFIX):
            return [[replica] for replica in self._in_turn(candidate_replicas)]
        replica_id = address.removeprefix(ADDRESS_PREFIX)
        wanted = [replica for replica in candidate_replicas if replica.replica_id.unique_id == replica_id]
        if wanted:
            return [wanted]
        if replica_id not in self._gone and time.time() - pending_request.created_at < LISTING_S:
            return []  # Serve asks again
        self._refuse(pending_request, replica_id)
        return [candidate_replicas]  # lets the routing task see that the request is done, and stop

    def _in_turn(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        ordered = sorted(replicas, key=lambda replica: str(replica.replica_id.unique_id))
        self._turn = (self._turn + 1) % len(ordered)
        return ordered[self._turn :] + ordered[: self._turn]

    def _refuse(self, pending_request: PendingRequest, replica_id: str) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # see `_fulfill_next_pending_request`
            pending_request.future.set_exception(ReplicaUnavailableError(replica_id))
        self._remove_pending_request_from_indices(pending_request)

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        super()._remove_pending_request_from_indices(pending_request)
        self._pending_by_metadata.pop(id(pending_request.metadata), None)

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Passes over a call that was cancelled: nothing was taken of the replica, and Serve goes on to the next call.

        To ask first would not do: as a client leaves, Serve cancels its calls from another thread, at any moment.
        """
        pending = self._pending_by_metadata.get(id(request_metadata))
        if pending is None:
            return
        with contextlib.suppress(asyncio.InvalidStateError):
            pending.future.set_result(replica)
            self._record_queue_wait_time(pending)
        self._remove_pending_request_from_indices(pending)


class IngressRouter(RequestRouter):
    """Chooses the ingress with the fewest requests, by this process's own count.

    Serve's count of what a replica has lags behind a burst: by it, one ingress would get all of it, and turn away what
    others have places for. What a client may ask of Serve's own routers by headers, a session's or a model's replica,
    is ignored.
    """

    def initialize_state(self, **limits: Any) -> None:
        http_protocol.use_in_this_process()  # Serve asks no other code of ours before the proxy's first request
        self._unread = Unread(limits["max_unread_bytes"], limits["max_unread_total_bytes"])

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return CountedReplica(replica_info, self._unread)

    async def choose_replicas(
        self, candidate_replicas: list[CountedReplica], pending_request: PendingRequest | None = None
    ) -> list[list[CountedReplica]]:
        in_any_order = random.sample(candidate_replicas, len(candidate_replicas))
        least = min(in_any_order, key=lambda replica: replica.under_way)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            least.expect(pending_request)
        others = [replica for replica in candidate_replicas if replica is not least]
        return [[least], others]  # these when it cannot be reached
