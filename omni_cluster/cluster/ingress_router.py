"""Which ingress gets an HTTP request; Serve runs it in its proxy, and so it counts there what clients do not read."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from omni_cluster.cluster.unread import CountedReplica, Unread
from omni_cluster.server import http_protocol


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
