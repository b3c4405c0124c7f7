"""What breaks as an engine dies is its death, also when it says so later: a request that met it may be begun again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineGenerateError

from omni_cluster.engine.build import bind, make_stage
from omni_cluster.types.errors import RequestGone, StageDied
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import PrefixHashes
from omni_cluster.vllm_engine import stage_llm
from omni_cluster.vllm_engine.output_processor import RowsSink
from omni_cluster.vllm_engine.stage_llm import MOST_SENDINGS, StageLLM
from tests.engine.stages import pipeline_config
from tests.rows import rows_of

CALL_FAILED = "Call to get_supported_tasks method failed: cancelled"


class Engine:
    """vLLM's client of an engine of which a part is gone: calls fail, and whoever reads its outputs is told later."""

    def __init__(self, dies: bool) -> None:
        self.errored = False
        self.has_failed, self._dies = asyncio.Event(), dies
        self.output_handler = asyncio.create_task(self._read())
        self.output_processor = SimpleNamespace(open_sink=lambda *_: RowsSink(), close_sink=lambda _: None)
        self.engine_core = SimpleNamespace(call_utility_async=self._call)

    async def _read(self) -> None:
        await self.has_failed.wait()
        await asyncio.sleep(0)
        if not self._dies:
            await asyncio.Event().wait()
        self.errored = True

    async def _call(self, *_: Any) -> None:
        self.has_failed.set()
        raise Exception(CALL_FAILED)

    async def check_health(self) -> None:
        """It has not heard of its end."""

    async def start(self, *_: Any) -> None:
        try:
            await self._call()
        except Exception as error:
            raise EngineGenerateError from error


def stage_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> StageLLM:
    config = pipeline_config()
    stage = cast(StageLLM, make_stage(config.stages[0], bind(config)))
    monkeypatch.setattr(stage, "_llm", engine)
    monkeypatch.setattr(stage, "_start", engine.start)
    return stage


async def test_a_request_that_meets_an_engine_s_death_may_be_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_on(Engine(dies=True), monkeypatch)
    stage.check_runs()
    with pytest.raises(StageDied, match="the engine of stage thinker died"):
        await anext(stage.generate(OmniRequest("r", "Hello.")))
    with pytest.raises(StageDied, match="the engine of stage thinker died"):
        stage.check_runs()


@pytest.mark.parametrize("part_bytes", [1, 24, 1 << 20])
@pytest.mark.parametrize("first", [0, 2])
async def test_rows_that_were_left_out_are_asked_of_the_engine_in_parts(
    monkeypatch: pytest.MonkeyPatch, first: int, part_bytes: int
) -> None:
    """Blocks of 12 bytes. What the engine has no more ends the request, and nobody is blamed for it."""
    names = [each.ljust(32) for each in (b"a", b"b", b"c")]
    known = {name: torch.full((2, 3), float(i), dtype=torch.bfloat16) for i, name in enumerate(names)}

    async def call(method: str, hashes: list[bytes]) -> bytes | None:
        assert method == "omni_find_rows"
        asked.append(len(hashes))
        found = [known[each] for each in hashes if each in known]
        return torch.cat(found).view(torch.uint8).numpy().tobytes() if len(found) == len(hashes) else None

    asked = list[int]()
    stage = stage_on(Engine(dies=False), monkeypatch)
    monkeypatch.setattr(stage_llm, "EARLIER_PART_BYTES", part_bytes)
    monkeypatch.setattr(stage.llm.engine_core, "call_utility_async", call)
    last = rows_of(4, torch.zeros(1, 3, dtype=torch.bfloat16), prefix=PrefixHashes(2, tuple(names)))
    chunk = stage._answering(StageChunk(rows=last))
    assert chunk.rows is not None and chunk.rows.earlier is not None
    parts = [part.tensor()[:, 0].tolist() async for part in chunk.rows.earlier(first)]
    assert parts == ([[0.0, 0.0], [1.0, 1.0]][first // 2 :] if part_bytes == 1 else [[0.0, 0.0, 1.0, 1.0][first:]])
    assert asked == [len(part) // 2 for part in parts]
    del known[names[1]]
    with pytest.raises(RequestGone, match=f"hidden states {first} to 4 of a cached prompt were evicted"):
        _ = [part async for part in chunk.rows.earlier(first)]


WITH_MEDIA = {"prompt_token_ids": [1], "mm_hashes": {"image": ["name"]}}
WITHOUT = {"prompt_token_ids": [1]}


@pytest.mark.parametrize(
    ("rendered", "ends", "sendings"),
    [
        (WITH_MEDIA, [["error"], ["error"], [None, "stop"]], 3),
        (WITH_MEDIA, [["error"], ["error"], ["error"]], MOST_SENDINGS),
        (WITH_MEDIA, [["error"], [None, "error"]], 2),
        (WITHOUT, [["error"]], 1),
        (WITHOUT, [[None, "error"]], 1),
    ],
    ids=["sent again", "too often", "begun", "no media", "no media, begun"],
)
async def test_a_request_that_the_engine_gives_up_is_no_answer_and_its_media_are_sent_again(
    monkeypatch: pytest.MonkeyPatch, rendered: dict[str, Any], ends: list[list[str | None]], sendings: int
) -> None:
    """vLLM makes an output without tokens of it, whose end is an error."""
    sent: list[Any] = []
    closed: list[int] = []

    async def generate(prompt: Any, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        sent.append(prompt)
        number = len(sent)
        try:
            for reason in ends[number - 1]:
                made = CompletionOutput(0, "", [], None, None, finish_reason=reason)
                yield RequestOutput("r", None, [1], None, [made], finished=reason is not None)
        finally:
            closed.append(number)

    async def render(prompt: Any) -> Any:
        return {**rendered, "again": True}

    stage = stage_on(Engine(dies=False), monkeypatch)
    monkeypatch.setattr(stage.llm, "generate", generate, raising=False)
    monkeypatch.setattr(stage, "_rendered", render)
    told: list[str | None] = []
    try:
        async for output in stage._outputs("r", {}, rendered, SamplingParams(), None):
            told.append(output.outputs[0].finish_reason)
    except RequestGone as gone:
        assert str(gone) == "the engine of stage thinker gave it up; send it again."
        assert ends[-1][-1] == "error"
    else:
        assert ends[-1][-1] == "stop"
    assert told == [reason for reason in ends[-1] if reason != "error"]
    assert closed == list(range(1, sendings + 1))
    assert sent == [rendered, *[{**rendered, "again": True}] * (sendings - 1)]


@pytest.mark.parametrize(
    ("dies", "raised", "words"), [(True, StageDied, "died; send the request again"), (False, RequestGone, "gave it up")]
)
async def test_what_an_engine_breaks_off_is_no_end(
    monkeypatch: pytest.MonkeyPatch, dies: bool, raised: type[Exception], words: str
) -> None:
    """One that is told to stop ends all of its requests as if they were aborted, and then itself."""

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        for tokens, reason in (([5], None), ([], "abort")):
            made = CompletionOutput(0, "", tokens, None, None, finish_reason=reason)
            yield RequestOutput("r", None, [1], None, [made], finished=reason is not None)

    async def start(*_: Any) -> AsyncGenerator[RequestOutput, None]:
        return outputs()

    monkeypatch.setattr(stage_llm, "DEATH_S", 0.01 if not dies else 60)
    engine = Engine(dies)
    stage = stage_on(engine, monkeypatch)
    monkeypatch.setattr(stage, "_start", start)
    engine.has_failed.set()
    chunks = stage.generate(OmniRequest("r", "Hello."))
    assert (await anext(chunks)).token_ids == (5,)
    with pytest.raises(raised, match=f"the engine of stage thinker {words}"):
        await anext(chunks)
    engine.output_handler.cancel()


async def test_names_of_media_are_forgotten_behind_the_prompt_that_is_processed() -> None:
    forgotten, is_processed = list[str](), threading.Event()
    cache = SimpleNamespace(invalidate=forgotten.append)
    with ThreadPoolExecutor(1) as executor:
        stage_llm._forget_media_in_turn(cast(Any, SimpleNamespace(mm_processor_cache=cache, _mm_executor=executor)))
        processing = executor.submit(is_processed.wait)
        cache.invalidate("name")
        assert forgotten == []
        is_processed.set()
        assert processing.result()
    assert forgotten == ["name"]


async def test_a_look_that_meets_an_engine_s_death_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_on(Engine(dies=True), monkeypatch)
    with pytest.raises(StageDied, match="the engine of stage thinker died"):
        await stage.check_health()


async def test_a_request_that_fails_alone_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_llm, "DEATH_S", 0.01)
    engine = Engine(dies=False)
    with pytest.raises(EngineGenerateError):
        await anext(stage_on(engine, monkeypatch).generate(OmniRequest("r", "Hello.")))
    engine.output_handler.cancel()
