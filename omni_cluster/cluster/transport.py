"""Calls between replicas by Ray Serve."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.failures import lost_with, named, named_failures
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.serve_private import context_without_parent
from omni_cluster.types.errors import StageDied

ADDRESS_PREFIX = "@"
"""Of a session id that names one exact replica."""
ANSWER_S = 10.0
"""How long a replica may take to answer a call that costs it nothing, and to say that it takes a request."""
MAX_VALUE_BYTES = 3 << 20
"""Arguments of a call that travel in Serve's gRPC, whose messages have 4 MiB at most; larger ones are Ray objects."""


class ReplicaSilent(StageDied):
    """A replica does not answer in time: it hangs, or has too much to do."""


def no_answer(replica_id: str, what: str) -> Exception:
    """The error for a replica that should have answered."""
    return lost_with(ReplicaSilent(f"replica {replica_id} {what}."), replica_id)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names the replica that works on a request: a consumer reads the request's log there."""

    request_id: str
    replica_id: str


# Not in the router's module: Serve sends its class, with copies of its module's variables, to each process that calls.
_running: dict[tuple[str, str], dict[str, str]] = {}


def set_running(app_name: str, deployment_name: str, nodes: Mapping[str, str]) -> None:
    """What a router of the deployment has just learnt: Ray's id of the node of each replica, by the replicas' ids."""
    _running[app_name, deployment_name] = dict(sorted(nodes.items()))


def known_replicas(app_name: str, deployment_name: str) -> Mapping[str, str] | None:
    """The nodes of the replicas that run, by their ids; None as long as this process has called none of them."""
    return _running.get((app_name, deployment_name))


def own_replica_id() -> str:
    """The id by which other replicas can address this one."""
    return cast(str, serve.get_replica_context().replica_id.unique_id)


def running_replicas() -> dict[str, int]:
    """Replicas of each deployment of this application that Serve holds to be healthy. Asks Serve's controller."""
    application = serve.status().applications[serve.get_replica_context().app_name]
    return {
        name: sum(count for state, count in status.replica_states.items() if state == "RUNNING")
        for name, status in application.deployments.items()
    }


async def ask_all(handle: DeploymentHandle, method: str, wait_s: float) -> list[Any]:
    """Returns what each running replica answers: None for one that breaks, or is not done within `wait_s`.

    As long as this process knows no replica, the one answer is None. A broadcast of Serve's own gives all or nothing.
    """
    ends_s = asyncio.get_running_loop().time() + wait_s
    try:
        async with asyncio.timeout_at(ends_s):
            asked = await handle.broadcast(method)._fetch_replica_results_async()
    except (TimeoutError, DeploymentUnavailableError):
        return [None]
    return list(await asyncio.gather(*(_answer(each, ends_s) for each in asked)))


def _call(handle: DeploymentHandle, method: str, *args: Any) -> Any:
    """Calls a replica. `_cancel` alone ends the call, in the thread that it is in: see `context_without_parent`."""
    return context_without_parent().run(getattr(handle, method).remote, *args)


def _cancel(asked: Any) -> None:
    """Ends a call. Of one that no replica was given, Serve raises once more why; the caller has that error already."""
    try:
        asked.cancel()
    except Exception as error:
        if not isinstance(named(error), StageDied):
            raise


async def _answer(asked: Any, ends_s: float) -> Any:
    try:
        async with asyncio.timeout_at(ends_s):
            return await asked.get_async()
    except TimeoutError:
        _cancel(asked)
    except RayError:  # the replica died, or logged what broke in it
        pass
    return None


class RemoteStage:
    """The replicas of one stage, as another deployment calls them. Raises StageDied if one is gone.

    `serving`: how many of them take requests at most; None: all.
    """

    def __init__(self, handle: DeploymentHandle, serving: int | None = None) -> None:
        self.loads = Loads(serving=serving)
        self._name = handle.app_name, handle.deployment_name
        self._unary = handle
        self._by_reference = handle.options(stream=True, _by_reference=True)
        self._by_value = handle.options(stream=True, _by_reference=False)

    def living(self) -> list[str] | None:
        """The replicas that were not lost; None as long as none of them is known here."""
        known = known_replicas(*self._name)
        return self.loads.living(list(known)) if known else None

    def can_choose(self) -> bool:
        """Whether there is a replica for a request."""
        return self.living() != []

    def choose_replica(self, conversation: bytes = b"", near_node: str | None = None) -> str | None:
        """A replica for a request, if `can_choose`; None as long as none of them is known here. See `Loads.choose`.

        `near_node`: where the request's input comes from.
        """
        living = self.living()
        if not living:  # the list may have changed since `can_choose`
            return None
        return self.loads.choose(living, conversation, [each for each in living if self.node_of(each) == near_node])

    def node_of(self, replica_id: str) -> str | None:
        """None for a replica that is not known here."""
        return (known_replicas(*self._name) or {}).get(replica_id)

    def count_living(self) -> int | None:
        """Replicas that this process does not know to be gone; None as long as it knows of none."""
        known = known_replicas(*self._name)
        return None if known is None else len(self.loads.living(list(known)))

    async def wake(self) -> None:
        """Returns once the stage has a replica. If it sleeps, Serve starts one for the call that waits."""
        asked = _call(self._unary, "awake")
        try:
            with named_failures():
                await asked
        except asyncio.CancelledError:
            _cancel(asked)  # or it would wait on
            raise

    async def stream(
        self, method: str, *args: Any, replica_id: str = "", by_reference: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Items of a streaming method; closing it ends the call over there.

        `by_reference`: each is a Ray object. Raises StoreFull for one that finds no room in the store, here or there.
        """
        is_small = not by_reference and len(pickle.dumps(args, protocol=5)) <= MAX_VALUE_BYTES
        handle = self._by_value if is_small else self._by_reference
        addressed = handle.options(session_id=ADDRESS_PREFIX + replica_id) if replica_id else handle
        items = _call(addressed, method, *args)
        try:
            with named_failures(replica_id):
                async for item in items:
                    yield item
        finally:
            _cancel(items)  # dropping a response does not stop its producer

    async def call(self, method: str, *args: Any, replica_id: str, wait_s: float | None = ANSWER_S) -> Any:
        """One result, by reference: a large one is read from the object store where it lies.

        Raises ReplicaSilent when there is none within `wait_s`.
        """
        asked = _call(self._unary.options(session_id=ADDRESS_PREFIX + replica_id), method, *args)
        try:
            with named_failures(replica_id):
                async with asyncio.timeout(wait_s):
                    return await asked
        except asyncio.CancelledError:
            _cancel(asked)
            raise
        except TimeoutError:
            _cancel(asked)
            raise no_answer(replica_id, f"did not answer within {wait_s} s") from None
