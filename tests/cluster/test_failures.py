"""However Ray, Serve, gRPC, vLLM or a socket says that a replica is gone, it is one kind of error."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import weakref
from collections.abc import Callable

import grpc
import pytest
from ray import ActorID, exceptions
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from omni_cluster.cluster.failures import StageFailed, lost_with, named, named_failures, portable
from omni_cluster.cluster.transport import ReplicaSilent
from omni_cluster.cluster.wire import MessageItem, packed, unpacked
from omni_cluster.engine.output_log import OutputLogFull, OutputLogUnknown
from omni_cluster.engine.sound.engine import SoundEngineStopped
from omni_cluster.server.refusals import error_answer
from omni_cluster.types.errors import (
    OmniError,
    PromptTooLong,
    RequestError,
    RequestGone,
    StageDied,
    StoreFull,
    without_frames,
)


def rpc_error(code: grpc.StatusCode) -> Exception:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "a detail")  # type: ignore[no-any-return]


def in_report(cause: Exception) -> Exception:
    """As Ray raises what broke in another process."""
    return exceptions.RayTaskError("generate", "a traceback", cause).as_instanceof_cause()  # type: ignore[no-any-return]


REF = "ab" * 28
GONE: list[Exception] = [
    exceptions.RayActorError(),
    exceptions.ActorDiedError(),
    exceptions.ActorUnavailableError("cannot be reached", ActorID.nil().binary()),
    exceptions.WorkerCrashedError(),
    exceptions.LocalRayletDiedError(),
    exceptions.NodeDiedError("the host died"),
    exceptions.OutOfMemoryError("killed"),
    exceptions.ObjectLostError(REF, b"", "here"),
    exceptions.OwnerDiedError(REF, b"", "here"),
    exceptions.ObjectFetchTimedOutError(REF, b"", "here"),
    exceptions.ReferenceCountingAssertionError(REF, b"", "here"),
    exceptions.TaskCancelledError(),
    exceptions.RpcError("no answer"),
    exceptions.GetTimeoutError("no answer"),
    ReplicaUnavailableError("replica"),
    DeploymentUnavailableError(DeploymentID("stage", "default")),
    RequestCancelledError("request"),
    BackPressureError(num_queued_requests=1, max_queued_requests=1),
    rpc_error(grpc.StatusCode.UNAVAILABLE),
    rpc_error(grpc.StatusCode.CANCELLED),
    rpc_error(grpc.StatusCode.INTERNAL),
    ConnectionResetError("reset"),
    BrokenPipeError("broken"),
    ConnectionRefusedError("refused"),
    asyncio.IncompleteReadError(b"", 8),
    StageDied("the connection ended."),
    ReplicaSilent("it did not answer"),
    OutputLogUnknown("request r: no output log is open here"),
    SoundEngineStopped("stage s does not run any more"),
    StageDied("the engine of stage s died"),
]
NOT_GONE: list[Exception] = [
    ZeroDivisionError("by zero"),
    ValueError("a bug"),
    FileNotFoundError("a file"),
    rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED),
    exceptions.RaySystemError("cannot be read"),
]


def name_of(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.parametrize("around", [lambda error: error, in_report], ids=["itself", "in Ray's report"])
@pytest.mark.parametrize("error", GONE, ids=name_of)
def test_what_says_that_a_replica_is_gone_is_one_error(
    error: Exception, around: Callable[[Exception], Exception]
) -> None:
    assert isinstance(named(around(error)), StageDied)
    status, body = error_answer(named(around(error)))
    assert (status, body["error"]["code"]) == (503, "stage_died")
    assert body["error"]["message"] == "a stage's replica died; send the request again."


@pytest.mark.parametrize("error", NOT_GONE, ids=name_of)
def test_what_says_something_else_stays_what_it_is(error: Exception) -> None:
    assert named(error) is error
    assert error_answer(named(error))[0] == 500


@pytest.mark.parametrize("error", [PromptTooLong("too long"), RequestError("no voice"), OutputLogFull("full")])
def test_an_error_of_ours_comes_out_of_ray_s_report(error: OmniError) -> None:
    assert named(in_report(error)) is error


@pytest.mark.parametrize("error", [*GONE, EngineDeadError()], ids=name_of)
def test_it_stays_that_error_over_a_connection(error: Exception) -> None:
    if isinstance(error, EngineDeadError):  # the engine's room names it, as the stage does
        error = StageDied("the engine of stage s died; send the request again.")
    for carried in (over_a_socket(portable(error)), pickle.loads(pickle.dumps(portable(error)))):
        assert error_answer(carried)[0] == 503


def test_another_error_is_a_stage_s_failure_over_a_connection() -> None:
    for carried in (over_a_socket(portable(KeyError("x"))), pickle.loads(pickle.dumps(portable(KeyError("x"))))):
        assert type(carried) is StageFailed and error_answer(carried)[0] == 500


@pytest.mark.parametrize("error", [StageDied("the engine died"), ReplicaSilent("it did not answer")], ids=name_of)
def test_which_replica_was_lost_is_said_once_and_travels(error: StageDied) -> None:
    lost_with(lost_with(portable(error), "the source"), "its reader")
    for carried in (over_a_socket(error), pickle.loads(pickle.dumps(error))):
        assert carried.replica_id == "the source"


@pytest.mark.parametrize(
    "error",
    [
        OutputLogUnknown("no log"),
        exceptions.TaskCancelledError(),
        RequestCancelledError("r"),
        rpc_error(grpc.StatusCode.CANCELLED),
    ],
    ids=name_of,
)
def test_who_ended_a_request_is_not_lost(error: Exception) -> None:
    ended = lost_with(named(error), "a replica")
    assert isinstance(ended, RequestGone) and not ended.replica_id


def over_a_socket(error: Exception) -> Exception:
    (item,) = unpacked([bytes(part) for part in packed([MessageItem(0, None, error)])])
    assert item.error is not None
    return item.error


@pytest.mark.parametrize("error", [exceptions.ObjectStoreFullError(), exceptions.OutOfDiskError()], ids=name_of)
def test_a_full_object_store_is_no_failure_of_the_server(error: Exception) -> None:
    assert isinstance(named(error), StoreFull)
    status, body = error_answer(named(error))
    assert (status, body["error"]["code"]) == (503, "store_full")
    assert "send it again later" in body["error"]["message"]


async def test_a_call_that_the_other_end_cancels_is_a_replica_gone() -> None:
    with pytest.raises(StageDied), named_failures():
        raise asyncio.CancelledError


async def test_one_s_own_cancellation_stays_one() -> None:
    async def work() -> None:
        with named_failures():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_end_of_a_timeout_is_no_replica_gone() -> None:
    with pytest.raises(TimeoutError), named_failures():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


class Held:
    """What a call was given."""


def fail_with(held: Held) -> None:
    raise ValueError("no room")


@pytest.mark.parametrize("kind", [exceptions.OutOfDiskError, ValueError])
def test_an_error_that_was_named_is_freed_with_its_frames(kind: type[Exception], no_search_for_garbage: None) -> None:
    """A process that has nothing to do searches for no garbage, and a frame may have a reference to a large object."""

    def fails_with(held: Held) -> None:
        raise kind("no room")

    held = Held()
    is_held = weakref.ref(held)
    with contextlib.suppress(StoreFull, ValueError), named_failures("replica"):
        fails_with(held)
    del held
    assert is_held() is None


def test_frames_that_are_kept_hold_nothing_of_a_call_that_failed() -> None:
    held = Held()
    is_held = weakref.ref(held)
    try:
        with named_failures():
            try:
                fail_with(held)
            except ValueError as error:
                raise StoreFull("no room") from error
    except StoreFull as error:
        assert error.__cause__ is not None
        kept = [error.__traceback__, error.__cause__.__traceback__]
        del held
        assert is_held() is not None
        alone = without_frames(error)
    assert all(kept) and is_held() is None
    assert isinstance(alone, StoreFull) and alone.__cause__ is None and alone.__traceback__ is None
