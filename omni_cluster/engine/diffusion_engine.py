"""One diffusion stage: its executor, and the loop that advances its jobs step by step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.v1.executor import Executor

from omni_cluster.config.engine_args import OmniEngineArgs
from omni_cluster.config.schema import DiffusionConfig, PipelineConfig, StageConfig
from omni_cluster.engine.step_loop import LoopJob, StepLoop
from omni_cluster.engine.step_scheduler import StepCost, StepScheduler
from omni_cluster.engine.version_check import check_vllm
from omni_cluster.errors import ConfigError, OmniError
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import DiffusionSession, Family
from omni_cluster.outputs import Pcm, StageChunk


class DiffusionEngineStopped(OmniError):
    """The stage was shut down, or broke, while a request waited for it."""


class DiffusionEngine:
    """A diffusion `Stage`: vLLM's executor with a `GPUDiffusionWorker`, and our own loop over the steps of jobs."""

    def __init__(self, stage: StageConfig, pipeline: PipelineConfig, family: Family, model: str) -> None:
        check_vllm()
        self._stage = stage
        self._family = family
        self._args = OmniEngineArgs.for_diffusion_stage(stage, pipeline, model)
        self._config = stage.diffusion or DiffusionConfig()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=stage.model_stage)  # the device's only user
        self._executor: Executor | None = None
        self._loop: StepLoop | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._sample_rate_hz = 0

    async def start(self) -> None:
        self._executor = await self._in_thread(self._make_executor)
        self._sample_rate_hz = await self._call("sample_rate_hz")
        steps = await self._call("steps_of_a_job")
        scheduler: StepScheduler[LoopJob] = StepScheduler(
            self._config.max_batch_frames, self._config.max_batch_size, StepCost(), time.monotonic
        )
        self._loop = StepLoop(self._call, steps, self._sample_rate_hz, self._config, scheduler, self._stopped)
        self._loop_task = asyncio.create_task(self._loop.run())

    def _make_executor(self) -> Executor:
        vllm_config = self._args.create_engine_config()
        with set_current_vllm_config(vllm_config):
            return Executor.get_class(vllm_config)(vllm_config)

    def check(self, request: OmniRequest) -> None:
        """See `Stage.check`: voice and codes are the family's to check."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: chunks of sound, one a job, and a last one without."""
        if upstream is None:
            raise ConfigError(f"stage {self._stage.model_stage} has no source; set its engine_input_source, e.g. [1].")
        loop, position = self._running_loop(), 0
        async with contextlib.aclosing(loop.waveforms(self._session(request, upstream))) as waveforms:
            async for samples in waveforms:
                yield StageChunk(pcm=Pcm(position, samples, self._sample_rate_hz))
                position += len(samples)
        yield StageChunk(finish_reason="stop")

    def _session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk]) -> DiffusionSession:
        return self._family.diffusion_session(self._stage.model_stage, request, upstream, self._config)

    def _running_loop(self) -> StepLoop:
        if self._loop is None or not self._runs:
            raise self._stopped()
        return self._loop

    def _stopped(self) -> DiffusionEngineStopped:
        return DiffusionEngineStopped(f"stage {self._stage.model_stage} does not run any more; send the request again.")

    async def _call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """What the worker's method gives."""
        if self._executor is None:
            raise RuntimeError(f"stage {self._stage.model_stage} is not started; await start() first.")
        executor = self._executor
        (given,) = await self._in_thread(lambda: executor.collective_rpc(method, args=args))
        return given

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def check_health(self) -> None:
        """See `Stage.check_health`: DiffusionEngineStopped."""
        if not self._runs:
            raise DiffusionEngineStopped(f"stage {self._stage.model_stage} does not run; start it again.")

    @property
    def _runs(self) -> bool:
        return self._loop_task is not None and not self._loop_task.done()

    async def counts(self) -> dict[str, int]:
        """See `Stage.counts`. `streams`: those whose state the model may hold."""
        return self._loop.counts() if self._loop is not None else {"running": 0, "waiting": 0, "streams": 0}

    async def shutdown(self) -> None:
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        executor, self._executor = self._executor, None
        if executor is not None:
            await self._in_thread(executor.shutdown)
        self._thread.shutdown()
