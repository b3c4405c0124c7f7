"""One sound stage: its worker, and the loop that advances its jobs step by step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.loop import COUNTED, StepLoop
from omni_cluster.engine.sound.playout import PlayoutDelay
from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.models.progress import Probe, Progress, StallWatch
from omni_cluster.models.sound import SoundSession
from omni_cluster.models.stage_spec import SoundSpec
from omni_cluster.types.errors import ConfigError, JobFailed, OmniError, SoundEngineStopped
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.stage_worker import StageWorker

logger = logging.getLogger(__name__)

_DEVICE_BROKE = re.compile(r"CUDA error|CUDA driver error|cuDNN error|Triton Error \[CUDA\]|Executor failed")
"""Messages of errors after which nothing more is computed: CUDA's, and vLLM's when a worker's process is gone."""

SLACK_PERCENT = "slack_percent"
"""Of `counts`: see `Slack.use`."""


class SoundEngine:
    """A sound `Stage`: a `StageWorker` of vLLM's, and our own loop over the steps of its jobs."""

    def __init__(self, stage: StageConfig, pipeline: PipelineConfig, spec: SoundSpec, model: str) -> None:
        self._stage = stage
        self._spec = spec
        self._options = spec.options(stage)
        self._playout = PlayoutDelay(self._options.max_playout_delay_ms / 1000)
        self._args = OmniEngineArgs.for_sound_stage(stage, pipeline, model)
        self._probe = Probe(self._progress, StallWatch(stage.model_stage, stage.stall_timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=stage.model_stage)  # the device's only user
        self._worker: StageWorker | None = None
        self._loop: StepLoop | None = None
        self._slack: Slack | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._is_ending = False

    async def start(self) -> None:
        await self._in_thread(self._make_worker)
        config, priors = self._options, self._spec.priors
        steps, overlaps = await self._call("steps_of_a_job"), await self._call("overlaps")
        cost, most = StepCost(priors.step, priors.usual_sizes), config.max_step_size
        scheduler = StepScheduler(most, config.max_batch_size, priors, cost, time.monotonic)
        self._slack = Slack(steps, most, priors, cost, time.monotonic)
        rate_hz, slack = self._spec.sample_rate_hz, self._slack
        self._loop = StepLoop(self._call, steps, rate_hz, config, scheduler, self._stopped, slack, overlaps=overlaps)
        self._loop_task = asyncio.create_task(self._loop.run())

    def _make_worker(self) -> None:
        self._worker = StageWorker(self._args)

    def check(self, request: OmniRequest) -> None:
        """See `Stage.check`: voice and codes are the family's to check."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: one chunk of sound a job, and a last chunk without sound.

        Of a request that is begun again, only the sound behind what its client has.
        """
        if upstream is None:
            raise ConfigError(f"stage {self._stage.model_stage} has no source; set its engine_input_source, e.g. [1].")
        known = request.known_of(self._stage.model_stage)
        if known.has_ended:
            yield StageChunk(finish_reason=known.finish_reason)
            return
        loop = self._running_loop()
        with self._player(request) as player:
            # The client of a stream that is begun again has begun to play.
            playout = self._playout if request.streams_audio and not known.num_samples else None
            session = self._session(request, upstream)
            async with contextlib.aclosing(loop.waveforms(session, player, playout)) as waveforms:
                async for position, samples in waveforms:
                    audio = AudioChunk(position, samples, self._spec.sample_rate_hz)
                    if audio.end > known.num_samples:
                        first_new = max(0, known.num_samples - audio.start)
                        yield StageChunk(audio=audio.part(first_new, len(samples)))
        yield StageChunk(finish_reason="stop")

    def _player(self, request: OmniRequest) -> contextlib.AbstractContextManager[Playback]:
        """The request's player. A whole answer is not heard while it is made, and does not count."""
        if self._slack is None or not request.streams_audio:
            return contextlib.nullcontext(Playback())
        return self._slack.player(request.request_id)

    def _session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk]) -> SoundSession:
        return self._spec.session(request, upstream, self._options)

    def _running_loop(self) -> StepLoop:
        if self._loop is None or not self._runs:
            raise self._stopped()
        return self._loop

    def _stopped(self) -> SoundEngineStopped:
        return SoundEngineStopped(f"stage {self._stage.model_stage} does not run any more; send the request again.")

    async def _call(self, method: str, *args: Any) -> Any:
        """Calls the worker's method. Raises SoundEngineStopped if device or worker can compute nothing more."""
        if self._worker is None:
            raise RuntimeError(f"stage {self._stage.model_stage} is not started; await start() first.")
        worker = self._worker
        try:
            (given,) = await self._in_thread(lambda: worker.call(method, *args))
        except Exception as error:
            if is_device_error(error) or self._worker_is_gone:
                logger.exception("the device of stage %s broke", self._stage.model_stage)
                raise self._stopped() from error
            raise self._job_error(error) from error
        return given

    def _job_error(self, error: Exception) -> OmniError:
        if isinstance(error, OmniError):
            return error
        logger.error("a call of stage %s failed", self._stage.model_stage, exc_info=error)
        return JobFailed(f"stage {self._stage.model_stage} could not make the sound: {error}")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def check_runs(self) -> None:
        """See `Stage.check_runs`."""
        self._running_loop()

    async def check_health(self) -> None:
        """See `Stage.check_health`."""
        if self._loop is None or not self._runs:
            raise SoundEngineStopped(f"stage {self._stage.model_stage} does not run; start it again.")
        try:
            await self._probe.check()
        except JobFailed as error:
            raise self._stopped() from error

    async def _progress(self) -> Progress:
        """While the engine is idle its device is asked: nothing else would notice its end."""
        loop = self._running_loop()
        if not loop.progress.has_work:
            await self._call("ask_device")
        return loop.progress

    @property
    def _runs(self) -> bool:
        return self._loop_task is not None and not self._loop_task.done() and not self._worker_is_gone

    @property
    def _worker_is_gone(self) -> bool:
        return self._worker is not None and self._worker.is_gone

    async def counts(self) -> dict[str, int]:
        """See `Stage.counts`."""
        if self._loop is None or self._slack is None:
            return dict.fromkeys((*COUNTED, SLACK_PERCENT), 0)
        return {**self._loop.counts(), SLACK_PERCENT: round(100 * self._slack.use())}

    async def shutdown(self) -> None:
        self._probe.close()
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # a loop that broke has failed its jobs
        if not self._is_ending:
            self._is_ending = True
            # In the thread that makes it: a start that was cancelled may still be at it.
            ended = asyncio.get_running_loop().run_in_executor(self._thread, self._end_worker)
            self._thread.shutdown(wait=False)
            await asyncio.shield(ended)

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()


def is_device_error(error: Exception) -> bool:
    """Whether this process can compute nothing more on the device. Running out of memory does not count."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _DEVICE_BROKE.search(str(error)) is not None
    )
