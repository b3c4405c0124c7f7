"""One diffusion stage: jobs are ordered by when their sound is due, and a batch runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.job_queue import JobQueue, PendingJob, Playback
from omni_cluster.errors import ConfigError, DiffusionEngineStopped, JobFailed, OmniError
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import DiffusionJob, DiffusionSession, Family
from omni_cluster.outputs import Pcm, StageChunk
from omni_cluster.progress import Progress, StallWatch
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.stage_worker import StageWorker

logger = logging.getLogger(__name__)

_DEVICE_BROKE = re.compile(r"CUDA error|CUDA driver error|cuDNN error|Triton Error \[CUDA\]|Executor failed")
"""What CUDA says of an error after which it computes nothing more, and vLLM when a worker's process is gone."""


class Streams:
    """The streams whose state the model may hold: those that run, and those that ended until it has forgotten them."""

    def __init__(self, max_streams: int, on_end: Callable[[], None]) -> None:
        self._free = asyncio.Semaphore(max_streams)
        self._on_end = on_end
        self._running = 0
        self._ended: list[str] = []
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def one_more(self, stream: str) -> AsyncIterator[None]:
        """Waits for a place, which is free again when the context is left.

        The stream may still be in the model then; it is forgotten before the next batch, which may begin another.
        """
        await self._wait_for_place()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.append(stream)
            self._free.release()
            self._on_end()

    async def _wait_for_place(self) -> None:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1

    def ended(self) -> list[str]:
        return list(self._ended)

    def forgotten(self, count: int) -> None:
        """The model has forgotten the `count` streams that ended first."""
        del self._ended[:count]

    def __len__(self) -> int:
        return self._running + len(self._ended)


class DiffusionEngine:
    """A diffusion `Stage`: a `StageWorker` of vLLM's, and our own batching loop."""

    def __init__(self, stage: StageConfig, pipeline: PipelineConfig, family: Family, model: str) -> None:
        self._stage = stage
        self._family = family
        self._args = OmniEngineArgs.for_diffusion_stage(stage, pipeline, model)
        self._config = stage.diffusion_settings
        self._queue = JobQueue(self._config)
        self._work = asyncio.Event()
        self._streams = Streams(self._config.max_streams, self._work.set)
        self._batch: list[PendingJob] = []
        self._batches = 0
        self._watch = StallWatch(stage.model_stage, stage.stall_timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=stage.model_stage)  # the device's only user
        self._worker: StageWorker | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._sample_rate_hz = 0
        self._frame_s = 0.0  # what a frame sounds for; known once a job was made

    async def start(self) -> None:
        self._worker = await self._in_thread(lambda: StageWorker(self._args))
        (self._sample_rate_hz,) = await self._call("sample_rate_hz")
        self._loop_task = asyncio.create_task(self._run_batches())

    def check(self, request: OmniRequest) -> None:
        """See `Stage.check`: voice and codes are the family's to check."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: chunks of sound, one a job, and a last one without."""
        if upstream is None:
            raise ConfigError(f"stage {self._stage.model_stage} has no source; set its engine_input_source, e.g. [1].")
        position, playback = 0, Playback()
        async with contextlib.AsyncExitStack() as cleanup:
            session = self._session(request, upstream)
            jobs = await cleanup.enter_async_context(_closing(session.jobs()))
            async for job in jobs:
                due_s = self._due_s(job, playback)
                if job.stream is not None and job.start == 0:
                    await cleanup.enter_async_context(self._streams.one_more(job.stream))
                samples = await self._submit(job, due_s, session.latest)
                playback.deliver(len(samples) / self._sample_rate_hz, time.monotonic())
                yield StageChunk(pcm=Pcm(position, samples, self._sample_rate_hz))
                position += len(samples)
        yield StageChunk(finish_reason="stop")

    def _session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk]) -> DiffusionSession:
        return self._family.diffusion_session(self._stage.model_stage, request, upstream, self._config)

    def _due_s(self, job: DiffusionJob, playback: Playback) -> float:
        """A whole answer may take as long as it sounds: its client waits anyway, and others hear theirs already."""
        now_s = time.monotonic()
        return now_s + job.frames * self._frame_s if job.stream is None else playback.due_s(now_s)

    async def _submit(self, job: DiffusionJob, due_s: float, latest: Callable[[], DiffusionJob]) -> np.ndarray:
        pending = PendingJob(job, due_s, asyncio.get_running_loop().create_future(), latest)
        if not self._runs:
            raise self._stopped()
        self._queue.put(pending)
        self._work.set()
        samples = await pending.done  # a caller that is cancelled cancels this, and the queue drops the job
        made = pending.job
        heard = 1 - made.look_ahead / len(made.codes)
        self._frame_s = len(samples) / self._sample_rate_hz / (made.frames * heard)
        return samples

    async def _run_batches(self) -> None:
        try:
            while True:
                await self._work.wait()
                await self._let_others_join()
                self._work.clear()
                await self._forget_ended()
                while batch := self._queue.take_batch():
                    await self._run(batch)
                    await self._forget_ended()
        finally:
            self._refuse_pending()

    async def _let_others_join(self) -> None:
        """An idle engine waits a moment: jobs that come together run together."""
        if len(self._queue) < self._config.max_batch_size:
            await asyncio.sleep(self._config.max_wait_ms / 1000)

    async def _forget_ended(self) -> None:
        """Between two batches: an ended stream's last job may have been in the one that just ran."""
        while ended := self._streams.ended():
            await self._call("forget", ended)
            self._streams.forgotten(len(ended))

    async def _run(self, batch: list[PendingJob]) -> None:
        """A job that breaks fails alone: those of a batch that failed, which changed no stream, run one by one."""
        self._batch = batch
        error = await self._error_of_making(batch)
        for pending in [] if error is None else batch:
            if len(batch) > 1 and not pending.done.done():
                error = await self._error_of_making([pending])
            if error is not None and not pending.done.done():
                pending.done.set_exception(self._job_error(error))
        self._batch = []

    async def _error_of_making(self, batch: list[PendingJob]) -> Exception | None:
        """Raises DiffusionEngineStopped for an error after which the device computes nothing more."""
        try:
            (waves,) = await self._call("generate", [p.job for p in batch])
        except Exception as error:
            if is_device_error(error) or self._worker_is_gone:
                logger.exception("the device of stage %s broke", self._stage.model_stage)
                raise self._stopped() from error
            return error
        finally:
            self._batches += 1
        for pending, wave in zip(batch, waves, strict=True):
            if not pending.done.done():
                pending.done.set_result(wave)
        return None

    def _job_error(self, error: Exception) -> OmniError:
        if isinstance(error, OmniError):
            return error
        logger.error("a job of stage %s failed", self._stage.model_stage, exc_info=error)
        return JobFailed(f"stage {self._stage.model_stage} could not make the sound: {error}")

    def _refuse_pending(self) -> None:
        for pending in [*self._batch, *self._queue.drain()]:
            if not pending.done.done():
                pending.done.set_exception(self._stopped())
        self._batch = []

    def _stopped(self) -> DiffusionEngineStopped:
        return DiffusionEngineStopped(f"stage {self._stage.model_stage} does not run any more; send the request again.")

    async def _call(self, method: str, *args: Any) -> list[Any]:
        if self._worker is None:
            raise RuntimeError(f"stage {self._stage.model_stage} is not started; await start() first.")
        worker = self._worker
        return await self._in_thread(lambda: worker.call(method, *args))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def check_health(self) -> None:
        """See `Stage.check_health`; a step is a batch."""
        if not self._runs:
            raise DiffusionEngineStopped(f"stage {self._stage.model_stage} does not run; start it again.")
        self._watch.look(Progress(self._batches, has_work=bool(self._batch or len(self._queue))))

    @property
    def _runs(self) -> bool:
        return self._loop_task is not None and not self._loop_task.done() and not self._worker_is_gone

    @property
    def _worker_is_gone(self) -> bool:
        return self._worker is not None and self._worker.is_gone

    async def counts(self) -> dict[str, int]:
        """See `Stage.counts`. `streams`: those whose state the model may hold."""
        waiting = len(self._queue) + self._streams.waiting
        return {"running": len(self._batch), "waiting": waiting, "streams": len(self._streams)}

    async def shutdown(self) -> None:
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # one that broke has told those who waited
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._in_thread(worker.shutdown)
        self._thread.shutdown()


def is_device_error(error: Exception) -> bool:
    """Whether nothing more can be computed on the device by this process; memory that is not there is no such error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _DEVICE_BROKE.search(str(error)) is not None
    )


@contextlib.asynccontextmanager
async def _closing(jobs: AsyncIterator[DiffusionJob]) -> AsyncIterator[AsyncIterator[DiffusionJob]]:
    try:
        yield jobs
    finally:
        if isinstance(jobs, AsyncGenerator):
            await jobs.aclose()
