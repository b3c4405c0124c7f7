"""What goes wrong between replicas, by kind: however Ray, Serve, gRPC or a socket says that a replica is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
from ray import exceptions as ray_exceptions
from ray.serve.exceptions import RayServeException, RequestCancelledError

from omni_cluster.types.errors import DIED, NO_ROOM, OmniError, RequestGone, StageDied, StoreFull


class StageFailed(Exception):
    """A stage broke while it worked on a request; its own log has the cause."""


_GONE = (
    ray_exceptions.RayActorError,  # died, or cannot be reached
    ray_exceptions.WorkerCrashedError,
    ray_exceptions.LocalRayletDiedError,
    ray_exceptions.NodeDiedError,
    ray_exceptions.OutOfMemoryError,  # Ray ended the replica
    ray_exceptions.ObjectLostError,  # its owner or its host died
    ray_exceptions.AsyncioActorExit,
    ray_exceptions.ActorUnschedulableError,
    ray_exceptions.ActorPlacementGroupRemoved,
    ray_exceptions.RpcError,
    ray_exceptions.GetTimeoutError,
    RayServeException,  # no replica of that name, none at all, or it refuses
    ConnectionError,
    asyncio.IncompleteReadError,
)
_GONE_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,  # the stream was reset
    grpc.StatusCode.UNKNOWN,  # the stream was removed
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_ENDED = (
    ray_exceptions.TaskCancelledError,  # by a replica that ends, or by Serve as the client left
    RequestCancelledError,
)
FULL = (ray_exceptions.ObjectStoreFullError, ray_exceptions.OutOfDiskError)
"""Ray's store of a node has no room, nor has the disk that Ray moves objects to."""


def named(error: Exception) -> Exception:
    """The error as one of ours if it is of a kind that this module knows; otherwise the error itself."""
    cause = _without_report(error)
    if isinstance(cause, OmniError):
        return cause
    if _says_ended(cause) or _says_ended(error):
        return RequestGone(f"{DIED} ({type(cause).__name__}: {_first_line(cause)})")
    if _says_gone(cause) or _says_gone(error):
        return StageDied(f"{DIED} ({type(cause).__name__}: {_first_line(cause)})")
    if isinstance(cause, FULL):
        return StoreFull(NO_ROOM)
    return error


def portable(error: BaseException) -> Exception:
    """The error in a form that another process can read: ours unchanged, any other as a StageFailed with its text."""
    ours = named(error) if isinstance(error, Exception) else error
    return ours if isinstance(ours, OmniError) else StageFailed(f"{type(error).__name__}: {error}")


def lost_with(error: Exception, replica_id: str) -> Exception:
    """The error, which says which replica was lost, unless it said so already or speaks of none."""
    if isinstance(error, StageDied) and not isinstance(error, RequestGone) and not error.replica_id:
        error.replica_id = replica_id
    return error


@contextlib.contextmanager
def named_failures(replica_id: str = "") -> Iterator[None]:
    """Raises what `named` makes of what is raised inside, where `replica_id` is called if it is not empty.

    A call that the other end has cancelled is StageDied too.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RequestGone(f"{DIED} (it ended the call)") from None
    except Exception as error:
        ours = lost_with(named(error), replica_id)
        if ours is error:
            raise
        try:
            raise ours from error
        finally:
            del ours  # this frame, which the error has, would keep it, and what its cause's frames have


def _without_report(error: Exception) -> Exception:
    """What the other replica raised, without Ray's reports around it."""
    while isinstance(error, ray_exceptions.RayTaskError) and isinstance(error.cause, Exception):
        if error.cause is error:
            break
        error = error.cause
    return error


def _says_ended(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.CANCELLED  # by the other end: one's own is asyncio's
    return isinstance(error, _ENDED)


def _says_gone(error: Exception) -> bool:
    if isinstance(error, grpc.RpcError):
        return isinstance(error, grpc.aio.AioRpcError) and error.code() in _GONE_CODES
    return isinstance(error, _GONE)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
