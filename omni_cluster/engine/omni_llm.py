"""All stages behind one object, without Ray: `OmniLLM` and its async twin."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.answer import Answer
from omni_cluster.engine.build import BoundPipeline, bind, make_stage
from omni_cluster.engine.outbox import Outbox
from omni_cluster.engine.stage import Stage
from omni_cluster.errors import RequestError
from omni_cluster.inputs import Media, OmniRequest
from omni_cluster.models.registry import known_families
from omni_cluster.outputs import OmniRequestOutput, StageChunk

MODALITIES = ("text", "audio")


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A chunk, and the stage that made it."""

    stage: str
    chunk: StageChunk


@dataclass(frozen=True, slots=True)
class OmniPrompt:
    """What `OmniLLM.generate` takes beside plain text: a prompt with media, after the chat template."""

    text: str
    media: Media = field(default_factory=Media)


class AsyncOmniLLM:
    """The whole pipeline in this process; the engines' cores are its children.

    Stages overlap per token: each consumes its source's chunks as they are made.
    """

    def __init__(self, config: PipelineConfig | Path | str | None = None) -> None:
        """Reads and checks the configuration (None: the embedded default); starts nothing. Raises ConfigError."""
        if not isinstance(config, PipelineConfig):
            config = load_config(config, known_families=known_families())
        self.bound: BoundPipeline = bind(config)
        self._stages: dict[str, Stage] = {}

    @property
    def config(self) -> PipelineConfig:
        return self.bound.config

    @property
    def voices(self) -> tuple[str, ...]:
        return self.bound.family.voices

    async def start(self) -> None:
        """Starts the engines, one after another; when one fails, those that run are shut down."""
        try:
            for stage in self.config.stages:
                engine = make_stage(stage, self.bound)
                self._stages[stage.model_stage] = engine
                await engine.start()
        except BaseException:
            await self.shutdown()
            raise

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template."""
        return self.bound.family.render(messages)

    async def stream(self, request: OmniRequest) -> AsyncIterator[StageEvent]:
        """Chunks of all stages that the request needs, as they are made. Raises RequestError.

        Closing the iterator ends the request in every stage.
        """
        self.bound.family.check_voice(request.voice)
        run = _Run(request, self.bound, self._stages)
        try:
            async for event in run.events():
                yield event
        finally:
            await run.close()

    async def generate(self, request: OmniRequest) -> OmniRequestOutput:
        """The whole answer to one request."""
        answer = Answer(request.request_id, {s.model_stage: s.final_output_type for s in self.config.stages})
        async for event in self.stream(request):
            answer.add(event.stage, event.chunk)
        return answer.finish()

    async def counts(self) -> dict[str, dict[str, int]]:
        """What each engine holds now, by stage name."""
        return {name: await stage.counts() for name, stage in self._stages.items()}

    async def shutdown(self) -> None:
        stages, self._stages = self._stages, {}
        for stage in reversed(stages.values()):
            await stage.shutdown()


class _Run:
    """One request on its way through the stages of this process: a task a stage, an outbox between two."""

    def __init__(self, request: OmniRequest, bound: BoundPipeline, stages: Mapping[str, Stage]) -> None:
        self._request = request
        self._bound = bound
        self._stages = stages
        self._outboxes: dict[int, Outbox] = {}
        self._events: asyncio.Queue[StageEvent | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def events(self) -> AsyncIterator[StageEvent]:
        needed = [s for s in self._bound.config.stages if self._is_needed(s)]
        for stage in needed:
            self._outboxes[stage.stage_id] = Outbox(
                self._request.request_id, self._bound.config.limits.outbox_max_bytes
            )
        for stage in needed:
            task = asyncio.create_task(self._drive(stage))
            task.add_done_callback(lambda _: self._events.put_nowait(None))
            self._tasks.append(task)
        for _ in range(len(needed)):
            while (event := await self._events.get()) is not None:
                yield event
            for task in self._tasks:
                if task.done():
                    task.result()

    def _is_needed(self, stage: StageConfig) -> bool:
        return self._request.wants_audio or stage.final_output_type == "text" or not stage.engine_input_source

    async def _drive(self, stage: StageConfig) -> None:
        outbox = self._outboxes[stage.stage_id]
        source = self._bound.source(stage)
        upstream = self._outboxes[source.stage_id].read() if source else None
        chunks = self._stages[stage.model_stage].generate(self._request, upstream)
        try:
            async for chunk in chunks:
                if self._bound.consumers(stage):
                    outbox.put(chunk)
                self._events.put_nowait(StageEvent(stage.model_stage, chunk.without_rows()))
            outbox.close()
        except Exception as error:
            outbox.fail(error)
            raise
        finally:
            await chunks.aclose()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


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

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._async.render(messages)

    def generate(
        self,
        prompts: str | OmniPrompt | Sequence[str | OmniPrompt],
        sampling_params_list: Sequence[Mapping[str, Any]] | None = None,
        *,
        modalities: Sequence[str] = MODALITIES,
        voice: str | Sequence[str] | None = None,
        seed: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """Answers to all prompts, batched by the engines.

        `sampling_params_list`: one mapping a stage, in the order of the configuration. `voice` and `seed`: one for
        all, or one a prompt. Raises RequestError before any prompt is started.
        """
        requests = self._requests(prompts, sampling_params_list, modalities, voice, seed)
        return self._run(self._generate_all(requests, use_tqdm))

    def _requests(
        self,
        prompts: str | OmniPrompt | Sequence[str | OmniPrompt],
        sampling_params_list: Sequence[Mapping[str, Any]] | None,
        modalities: Sequence[str],
        voice: str | Sequence[str] | None,
        seed: int | Sequence[int],
    ) -> list[OmniRequest]:
        if isinstance(prompts, str | OmniPrompt):
            prompts = [prompts]
        wants_audio = check_modalities(modalities)
        sampling = self._sampling(sampling_params_list)
        voices = _one_each(
            "voice", voice if not isinstance(voice, str) and voice is not None else [voice], len(prompts)
        )
        seeds = _one_each("seed", [seed] if isinstance(seed, int) else seed, len(prompts))
        for name in voices:
            self._async.bound.family.check_voice(name)
        full = [p if isinstance(p, OmniPrompt) else OmniPrompt(p) for p in prompts]
        return [
            OmniRequest(uuid.uuid4().hex, p.text, p.media, wants_audio, v, sampling, s)
            for p, v, s in zip(full, voices, seeds, strict=True)
        ]

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

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

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


def check_modalities(modalities: Sequence[str]) -> bool:
    """Whether audio is wanted; RequestError for a modality that does not exist, or without text."""
    unknown = [m for m in modalities if m not in MODALITIES]
    if unknown or "text" not in modalities:
        raise RequestError(f"modalities is {list(modalities)}; use ['text'] or ['text', 'audio'].")
    return "audio" in modalities


def _one_each(name: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} values for {count} prompts; give one, or one a prompt.")
    return list(values)
