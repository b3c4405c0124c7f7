"""Stages on the tiny checkpoint, requests for them, and rows fed to a talker by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import torch

from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, make_stage
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import Media, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.configs import TINY_CONFIG
from tests.reference import SpeechReference, ThinkerReference, media, prompt_text, videos
from tests.rows import rows_of

T = TypeVar("T")

Speak = Callable[..., SpeechReference]
"""The fixture `speak`: (kind, voice, seed) -> the reference's spoken reply."""

MAX_TOKENS = 16
MAX_CODES = 60
THINKER_STEP_TOKENS, TALKER_STEP_TOKENS = 48, 32
"""Of a step of the tight engines; see `tight`."""
KEPT_ROWS_BYTES = 8 * 32 * 128 * 4
"""Of the tight thinker: rows of eight blocks, of the twelve in its KV cache."""
PATIENCE_S = 60
"""Until a condition that must come: a test that waits this long has failed."""
POLL_S = 0.005

_ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "gpu_memory_utilization": 0.15,  # read on a GPU only, where the stages share a card
}


def thinker_stage(**engine_args: Any) -> StageConfig:
    return StageConfig(
        stage_id=0,
        model_stage="thinker",
        num_gpus=0,
        final_output_type="text",
        engine_args={**_ENGINE_ARGS, "limit_mm_per_prompt": {"audio": 6, "image": 2, "video": 2}, **engine_args},
        default_sampling_params={"temperature": 0, "max_tokens": MAX_TOKENS},
    )


def talker_stage(**engine_args: Any) -> StageConfig:
    return StageConfig(
        stage_id=1,
        model_stage="talker",
        engine_input_source=[0],
        num_gpus=0,
        engine_args={**_ENGINE_ARGS, **engine_args},
        default_sampling_params={"temperature": 0, "repetition_penalty": 1.05, "max_tokens": MAX_CODES},
    )


def tight(max_num_batched_tokens: int) -> dict[str, int]:
    """Engine arguments: prompts need several steps, and eight requests do not fit into the KV cache at once."""
    return {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 12 * 32 * 1024,  # twelve blocks
    }


def code2wav_stage() -> StageConfig:
    return StageConfig(
        stage_id=2, model_stage="code2wav", engine_input_source=[1], num_gpus=0, final_output_type="audio"
    )


def pipeline_config(
    thinker: StageConfig | None = None, talker: StageConfig | None = None, **settings: Any
) -> PipelineConfig:
    stages = [thinker or thinker_stage(), talker or talker_stage(), code2wav_stage()]
    return PipelineConfig(model="preset:tiny", family="qwen2_5_omni", stages=stages, **settings)


def short_default() -> PipelineConfig:
    """The embedded default with the lengths of `pipeline_config`."""
    config = load_config(TINY_CONFIG, known_families=known_families())
    return config.model_copy(update={"stages": [shortened(stage) for stage in config.stages]})


def shortened(stage: StageConfig) -> StageConfig:
    most = {"thinker": MAX_TOKENS, "talker": MAX_CODES}.get(stage.model_stage)
    sampling = stage.default_sampling_params | ({} if most is None else {"max_tokens": most})
    return stage.model_copy(update={"default_sampling_params": sampling})


@asynccontextmanager
async def running(config: PipelineConfig, model_stage: str) -> AsyncIterator[Stage]:
    """One stage of a configuration, alone."""
    stage = next(s for s in config.stages if s.model_stage == model_stage)
    engine = make_stage(stage, bind(config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def request(request_id: str, kind: str = "text", **fields: Any) -> OmniRequest:
    """The request that the reference was given as `prompt_text(kind)` with `media(kind)` and `videos(kind)`."""
    audios, images = media(kind)
    return OmniRequest(
        request_id, prompt_text(kind), Media(tuple(audios), tuple(images), tuple(videos(kind))), **fields
    )


async def collect(chunks: AsyncIterator[StageChunk]) -> StageChunk:
    """All that a stage said of a request, as one chunk."""
    return StageChunk.joined([chunk async for chunk in chunks])


def thinker_chunks(made: ThinkerReference) -> list[StageChunk]:
    """The reference's thinker in the thinker stage's words: with each token the rows that were computed for it."""
    prompt, rows = len(made.prompt_ids), made.rows
    first = StageChunk(0, (made.token_ids[0],), rows=rows_of(0, rows[:prompt], made.positions))
    later = [
        StageChunk(j, (token,), rows=rows_of(prompt + j - 1, rows[prompt + j - 1 : prompt + j]))
        for j, token in enumerate(made.token_ids[1:], start=1)
    ]
    last = StageChunk(len(made.token_ids), finish_reason="length")
    return [first, *later, last]


async def whole_rows(joined: Rows) -> torch.Tensor:
    """All rows of a request, with those that an earlier prompt had and that were left out."""
    earlier = [] if joined.earlier is None else [part async for part in joined.earlier(0)]
    return torch.cat([part.tensor() for part in (*earlier, joined)])


async def at_once(chunks: list[StageChunk]) -> AsyncIterator[StageChunk]:
    for chunk in chunks:
        yield chunk


class Feed:
    """An upstream whose chunks come when the test gives them."""

    def __init__(self, *chunks: StageChunk) -> None:
        self._items: asyncio.Queue[StageChunk | Exception | None] = asyncio.Queue()
        self.give(*chunks)

    def give(self, *chunks: StageChunk) -> None:
        for chunk in chunks:
            self._items.put_nowait(chunk)

    def fail(self, error: Exception) -> None:
        self._items.put_nowait(error)

    def end(self) -> None:
        self._items.put_nowait(None)

    async def is_read(self) -> bool:
        """Whether all that was given has been taken."""
        return self._items.empty()

    async def read(self) -> AsyncIterator[StageChunk]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks every few milliseconds until the condition holds.

    Asked without a pause, the loop would hold Python's lock for 5 ms at each operation of an engine's thread.
    """

    async def holds() -> None:
        while not await condition():
            await asyncio.sleep(POLL_S)

    await asyncio.wait_for(holds(), PATIENCE_S)


async def until_all(feeds: Sequence[Feed]) -> None:
    """Until all that was given has been taken."""

    async def are_read() -> bool:
        return all([await feed.is_read() for feed in feeds])

    await until(are_read)


async def until_counts(stage: Stage, **wanted: int) -> None:
    async def as_wanted() -> bool:
        counts = await stage.counts()
        return all(counts[name] == value for name, value in wanted.items())

    await until(as_wanted)


async def begun_at_once(stage: Stage, made: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What requests yield that all wait before the engine begins the first: else a busy machine has them in turns."""
    llm = cast(StageLLM, stage).llm
    await llm.pause_generation(mode="keep", clear_cache=False)
    tasks = [asyncio.create_task(each) for each in made]

    async def wait_all() -> bool:
        counts = await stage.counts()
        return counts["waiting"] + counts["running"] == len(tasks)

    try:
        await until(wait_all)
    finally:
        await llm.resume_generation()
    return await asyncio.gather(*tasks)


@asynccontextmanager
async def halted_within(
    stage: Stage, made: Coroutine[Any, Any, T], positions: int = 1
) -> AsyncIterator[asyncio.Task[T]]:
    """The only request of an engine that has computed so many positions of it, and goes on at the end of the context.

    To halt it once a chunk is there would be too late on a busy machine: the engine may be done with it by then.
    """
    llm = cast(StageLLM, stage).llm
    enough = (await stage.counts())["computed"] + positions
    await llm.pause_generation(mode="keep", clear_cache=False)
    task = asyncio.create_task(made)
    try:
        await until_counts(stage, waiting=1)
        while (await stage.counts())["computed"] < enough:
            # The engine is told both at once, and takes few steps between them.
            await asyncio.gather(llm.resume_generation(), llm.pause_generation(mode="keep", clear_cache=False))
        await until_counts(stage, running=1)
        yield task
    finally:
        await llm.resume_generation()


async def until_free(stage: Stage) -> None:
    """Until the stage holds nothing of any request."""
    await until_counts(stage, running=0, waiting=0, held=0, kv_blocks_used=0, held_blocks=0, row_counts=0, emitting=0)
