"""All stages behind one object, without Ray: `OmniLLM` and its async twin."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector
from tqdm import tqdm

from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline, bind, make_stage
from omni_cluster.engine.caches import use_cache_dir
from omni_cluster.engine.cards import card_environment, environment
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.driver import run_stage
from omni_cluster.engine.exposition import ReplicaMetrics, merged, text_of
from omni_cluster.engine.fan_in import Emit, FanIn, StageEvent
from omni_cluster.engine.fitting import fit_process
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.engine.output_log import OutputLog
from omni_cluster.engine.pipeline import whole_answer
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import RequestError, StageDied
from omni_cluster.types.inputs import Media, OmniRequest, Prompt
from omni_cluster.types.modalities import MODALITIES
from omni_cluster.types.outputs import OmniRequestOutput

REPLICA = "local"
"""What metrics of this process name as their replica."""


@dataclass(frozen=True, slots=True)
class OmniPrompt:
    """What `OmniLLM.generate` takes beside what `render` made: the same with media."""

    text: Prompt | str
    media: Media = field(default_factory=Media)


class AsyncOmniLLM:
    """The whole pipeline in this process, a `Pipeline`; the engines' cores are its children.

    Stages overlap per token: each consumes its source's chunks as they are made.
    """

    sleepers: frozenset[str] = frozenset()

    def __init__(self, config: PipelineConfig | Path | str | None = None) -> None:
        """Reads and checks the configuration (None: the embedded default); starts nothing. Raises ConfigError."""
        if not isinstance(config, PipelineConfig):
            config = load_config(config, known_families=known_families())
        use_cache_dir(config.cache_dir)
        self.bound: BoundPipeline = bind(config)
        self._stages: dict[str, Stage] = {}
        self._metrics = {stage.model_stage: StageMetrics() for stage in config.stages}
        self._open_logs: Counter[str] = Counter()

    @property
    def config(self) -> PipelineConfig:
        return self.bound.config

    @property
    def voices(self) -> tuple[str, ...]:
        return self.bound.family.voices

    async def start(self) -> None:
        """Starts the engines, one after another; when one fails, those that run are shut down.

        Raises ConfigError, before any is started, for memory that the cards do not have.
        """
        self.bound = await asyncio.to_thread(fit_process, self.bound)
        try:
            self._stages = {s.model_stage: make_stage(s, self.bound) for s in self.config.stages}
            for stage in self.config.stages:
                with environment(card_environment(stage)):
                    await self._stages[stage.model_stage].start()
        except BaseException:
            await self.shutdown()
            raise

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """The prompt of a conversation, by the checkpoint's chat template."""
        return self.bound.family.render(messages)

    def check(self, request: OmniRequest) -> None:
        """Raises RequestError for what any stage that the request needs would refuse."""
        self.bound.check(request)
        for stage in self.bound.stages_for(request):
            self._stages[stage.model_stage].check(request)

    async def stream(self, request: OmniRequest, deadline: Deadline | None = None) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made. Raises RequestError.

        Closing the iterator ends the request in every stage. `deadline`: the configuration's if None.
        """
        self.check(request)
        run = FanIn(deadline or Deadline(self.config.limits.request_timeout_s))
        stages = self.bound.stages_for(request)
        logs = {each.stage_id: OutputLog(request.request_id, self.config.limits.outbox_max_bytes) for each in stages}
        for stage in stages:
            run.add(functools.partial(self._drive, stage, request, logs))
        with self._counted([stage.model_stage for stage in stages]):
            async with contextlib.aclosing(run.events()) as events:
                async for event in events:
                    yield event

    @contextlib.contextmanager
    def _counted(self, stages: Sequence[str]) -> Iterator[None]:
        """Counts the stages' logs as open while the context is."""
        self._open_logs.update(stages)
        try:
            yield
        finally:
            self._open_logs.subtract(stages)

    async def _drive(self, stage: StageConfig, request: OmniRequest, logs: Mapping[int, OutputLog], emit: Emit) -> None:
        """Runs one stage for a request: from its source's log to its own."""
        log = logs[stage.stage_id]
        source = self.bound.source(stage)
        meter = self._metrics[stage.model_stage].begin(request.known_of(stage.model_stage))
        upstream = logs[source.stage_id].read() if source else None
        try:
            async with contextlib.aclosing(
                run_stage(self._stages[stage.model_stage], request, upstream, meter)
            ) as chunks:
                async for chunk in chunks:
                    if self.bound.consumers(stage):
                        log.put(chunk)
                    if chunk.finish_reason is not None:
                        meter.end("finished")
                    await emit(StageEvent(stage.model_stage, chunk.without_rows()))
            log.close()
        except Exception as error:
            meter.end("failed")
            log.fail(error)
            raise
        finally:
            meter.end("cancelled")  # what has not ended yet

    async def generate(self, request: OmniRequest) -> OmniRequestOutput:
        """The whole answer to one request."""
        return await whole_answer(self, request, Deadline(self.config.limits.request_timeout_s))

    async def counts(self) -> dict[str, dict[str, int]]:
        """What each engine holds now, by stage name."""
        return {name: await stage.counts() for name, stage in self._stages.items()}

    async def replicas(self) -> dict[str, int]:
        """See `Pipeline.replicas`: one of each stage, or 0 if its engine can no longer serve."""
        return {name: await _serves(stage) for name, stage in self._stages.items()}

    async def metrics(self, own: Collector) -> bytes:
        """See `Pipeline.metrics`."""
        given = ReplicaMetrics.of(own, REPLICA).metrics
        for name, counts in (await self.counts()).items():
            metrics = self._metrics[name]
            metrics.hold(counts, self._open_logs[name])
            given += ReplicaMetrics.of(metrics.registry, REPLICA, stage=name).metrics
        return text_of(merged(given))

    async def shutdown(self) -> None:
        """All at once: Ray ends a batch's engines as their process ends; one that is shut down later counts as dead."""
        stages, self._stages = self._stages, {}
        await asyncio.gather(*(stage.shutdown() for stage in reversed(stages.values())))


class OmniLLM:
    """The whole pipeline, synchronous: many prompts at once, a progress bar, answers in the order of the prompts."""

    def __init__(self, config: PipelineConfig | Path | str | None = None) -> None:
        """Starts all engines, which takes some ten seconds each. Raises ConfigError before anything is started."""
        self._async = AsyncOmniLLM(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-llm", daemon=True)
        self._thread.start()
        try:
            self._run(self._async.start())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def voices(self) -> tuple[str, ...]:
        return self._async.voices

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        return self._async.render(messages)

    def generate(
        self,
        prompts: str | Prompt | OmniPrompt | Sequence[str | Prompt | OmniPrompt],
        sampling_params_list: Sequence[Mapping[str, Any]] | None = None,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | Sequence[str] | None = None,
        seed: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """Answers to all prompts, batched by the engines.

        `sampling_params_list`: one mapping a stage, in the order of the configuration. `modalities`: None for all
        that the stages make. `voice` and `seed`: one for all, or one a prompt. Raises RequestError before any prompt
        is started.
        """
        requests = self._requests(prompts, sampling_params_list, modalities, voice, seed)
        return self._run(self._generate_all(requests, use_tqdm))

    def _requests(
        self,
        prompts: str | Prompt | OmniPrompt | Sequence[str | Prompt | OmniPrompt],
        sampling_params_list: Sequence[Mapping[str, Any]] | None,
        modalities: Sequence[str] | None,
        voice: str | Sequence[str] | None,
        seed: int | Sequence[int],
    ) -> list[OmniRequest]:
        if isinstance(prompts, str | Prompt | OmniPrompt):
            prompts = [prompts]
        wanted = self._async.bound.made if modalities is None else checked_modalities(modalities)
        sampling = self._sampling(sampling_params_list)
        voices = _one_each(
            "voice", voice if not isinstance(voice, str) and voice is not None else [voice], len(prompts)
        )
        seeds = _one_each("seed", [seed] if isinstance(seed, int) else seed, len(prompts))
        full = [p if isinstance(p, OmniPrompt) else OmniPrompt(p) for p in prompts]
        requests = [
            OmniRequest(
                uuid.uuid4().hex, p.text, p.media, "audio" in wanted, v, sampling, s, wants_images="image" in wanted
            )
            for p, v, s in zip(full, voices, seeds, strict=True)
        ]
        for request in requests:
            self._async.check(request)
        return requests

    def _sampling(self, given: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
        names = [s.model_stage for s in self._async.config.stages]
        if given is not None and len(given) != len(names):
            raise RequestError(f"sampling_params_list has {len(given)} entries; give one a stage: {', '.join(names)}.")
        return dict(zip(names, given or [], strict=False))

    async def _generate_all(self, requests: Sequence[OmniRequest], use_tqdm: bool) -> list[OmniRequestOutput]:
        with tqdm(total=len(requests), disable=not use_tqdm, unit="request") as bar:

            async def one(request: OmniRequest) -> OmniRequestOutput:
                output = await self._async.generate(request)
                bar.update()
                return output

            tasks = [asyncio.create_task(one(request)) for request in requests]
            try:
                return list(await asyncio.gather(*tasks))
            finally:  # one that failed ends the others
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def shutdown(self) -> None:
        """Ends all engines; safe to call twice."""
        if self._loop.is_running():
            self._run(self._async.shutdown())
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


async def _serves(stage: Stage) -> int:
    try:
        await stage.check_health()
    except StageDied:
        return 0
    return 1


def checked_modalities(modalities: Sequence[str]) -> Sequence[str]:
    """RequestError for a modality that does not exist, or without text."""
    if "text" not in modalities or not set(modalities) <= set(MODALITIES):
        raise RequestError(f"modalities is {list(modalities)}; use 'text', alone or with 'audio' and 'image'.")
    return modalities


def _one_each(name: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} values for {count} prompts; give one, or one a prompt.")
    return list(values)
