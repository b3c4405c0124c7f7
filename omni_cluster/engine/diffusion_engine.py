"""One diffusion stage: requests are grouped by shape, and a batch runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import set_current_vllm_config
from vllm.v1.executor import Executor

from omni_cluster.config.engine_args import OmniEngineArgs
from omni_cluster.config.schema import DiffusionConfig, PipelineConfig, StageConfig
from omni_cluster.engine.version_check import check_vllm
from omni_cluster.errors import ConfigError, OmniError
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import DiffusionJob, Family
from omni_cluster.outputs import Pcm, StageChunk

MAX_PADDING = 1.25
"""The longest job of a batch has at most this times the frames of the shortest: the rest would be wasted work."""


class DiffusionEngineStopped(OmniError):
    """The stage was shut down while a request waited for it."""


@dataclass(slots=True)
class PendingJob:
    """A job, and where its waveform will be."""

    job: DiffusionJob
    done: asyncio.Future[np.ndarray]


class JobQueue:
    """Jobs that wait for a batch, oldest first. Bounded by the requests that admission lets in: one job each."""

    def __init__(self, config: DiffusionConfig) -> None:
        self._config = config
        self._pending: list[PendingJob] = []

    def put(self, pending: PendingJob) -> None:
        self._pending.append(pending)

    def take_batch(self) -> list[PendingJob]:
        """The oldest job with those, in order of arrival, whose shape is near enough; [] when none waits."""
        self._pending = [p for p in self._pending if not p.done.done()]  # cancelled meanwhile
        batch: list[PendingJob] = []
        for pending in self._pending:
            if self._fits(batch, pending.job):
                batch.append(pending)
        taken = set(map(id, batch))
        self._pending = [p for p in self._pending if id(p) not in taken]
        return batch

    def _fits(self, batch: list[PendingJob], job: DiffusionJob) -> bool:
        if not batch:
            return True
        frames = [p.job.frames for p in batch] + [job.frames]
        return (
            len(frames) <= self._config.max_batch_size
            and len(frames) * max(frames) <= self._config.max_batch_frames
            and max(frames) <= MAX_PADDING * min(frames)
        )

    def drain(self) -> list[PendingJob]:
        pending, self._pending = self._pending, []
        return pending

    def __len__(self) -> int:
        return len(self._pending)


class DiffusionEngine:
    """A diffusion `Stage`: vLLM's executor with a `GPUDiffusionWorker`, and our own batching loop."""

    def __init__(self, stage: StageConfig, pipeline: PipelineConfig, family: Family, model: str) -> None:
        check_vllm()
        self._stage = stage
        self._family = family
        self._args = OmniEngineArgs.for_diffusion_stage(stage, pipeline, model)
        self._config = stage.diffusion or DiffusionConfig()
        self._queue = JobQueue(self._config)
        self._arrived = asyncio.Event()
        self._running = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=stage.model_stage)  # the device's only user
        self._executor: Executor | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._sample_rate_hz = 0

    async def start(self) -> None:
        self._executor = await self._in_thread(self._make_executor)
        (self._sample_rate_hz,) = await self._call("sample_rate_hz")
        self._loop_task = asyncio.create_task(self._run_batches())

    def _make_executor(self) -> Executor:
        vllm_config = self._args.create_engine_config()
        with set_current_vllm_config(vllm_config):
            return Executor.get_class(vllm_config)(vllm_config)

    def check(self, request: OmniRequest) -> None:
        """See `Stage.check`: voice and codes are the family's to check."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: chunks of sound, and a last one without."""
        if upstream is None:
            raise ConfigError(f"stage {self._stage.model_stage} has no source; set its engine_input_source, e.g. [1].")
        session = self._family.diffusion_session(self._stage.model_stage, request, upstream)
        position = 0
        async for job in session.jobs():
            samples = await self._submit(job)
            yield StageChunk(pcm=Pcm(position, samples, self._sample_rate_hz))
            position += len(samples)
        yield StageChunk(finish_reason="stop")

    async def _submit(self, job: DiffusionJob) -> np.ndarray:
        pending = PendingJob(job, asyncio.get_running_loop().create_future())
        self._queue.put(pending)
        self._arrived.set()
        return await pending.done  # a caller that is cancelled cancels this, and the queue drops the job

    async def _run_batches(self) -> None:
        while True:
            await self._arrived.wait()
            await self._let_others_join()
            self._arrived.clear()
            while batch := self._queue.take_batch():
                self._running = len(batch)
                await self._run(batch)
                self._running = 0

    async def _let_others_join(self) -> None:
        """An idle engine waits a moment: jobs that come together run together."""
        if len(self._queue) < self._config.max_batch_size:
            await asyncio.sleep(self._config.max_wait_ms / 1000)

    async def _run(self, batch: list[PendingJob]) -> None:
        try:
            (waves,) = await self._call("generate", [p.job for p in batch])
        except Exception as error:  # a boundary: the batch's requests get the error, the stage goes on
            for pending in batch:
                if not pending.done.done():
                    pending.done.set_exception(error)
            return
        for pending, wave in zip(batch, waves, strict=True):
            if not pending.done.done():
                pending.done.set_result(wave)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        if self._executor is None:
            raise RuntimeError(f"stage {self._stage.model_stage} is not started; await start() first.")
        executor = self._executor
        return await self._in_thread(lambda: executor.collective_rpc(method, args=args))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def check_health(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            raise DiffusionEngineStopped(f"stage {self._stage.model_stage} does not run; start it again.")

    async def counts(self) -> dict[str, int]:
        return {"running": self._running, "waiting": len(self._queue)}

    async def shutdown(self) -> None:
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for pending in self._queue.drain():
            if not pending.done.done():
                pending.done.set_exception(
                    DiffusionEngineStopped(f"stage {self._stage.model_stage} was shut down; send the request again.")
                )
        executor, self._executor = self._executor, None
        if executor is not None:
            await self._in_thread(executor.shutdown)
        self._thread.shutdown()
