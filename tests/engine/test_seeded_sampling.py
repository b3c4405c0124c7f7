"""A request that has a seed gets the same tokens alone, beside any neighbour, chunked and preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import pytest_asyncio

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.codes import codes_of
from tests.engine.stages import (
    MAX_TOKENS,
    Feed,
    at_once,
    begun_at_once,
    collect,
    request,
    thinker_chunks,
    until_free,
)
from tests.reference import Reference, media, prompt_text

pytestmark = [pytest.mark.parity, pytest.mark.full]

Sampling = dict[str, Any]

SEEDED: Mapping[str, Sampling] = {
    "everything": {"temperature": 1.0, "seed": 1},
    "minus-one": {"temperature": 1.0, "seed": -1},
    "few": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "seed": 2, "repetition_penalty": 1.05},
    "many": {"temperature": 1.2, "top_k": 90, "top_p": 0.95, "seed": 3},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 - 1},
    "min-p": {"temperature": 1.0, "min_p": 0.02, "top_k": 50, "seed": 5, "repetition_penalty": 1.3},
    "penalised": {"temperature": 1.0, "seed": 6, "top_k": 40, "presence_penalty": 1.5, "repetition_penalty": 1.1},
    "counted": {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "counted, greedy": {"temperature": 0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
}
NEIGHBOURS: tuple[Sampling, ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 1, "frequency_penalty": 1.0, "top_k": 20},
)
KIND = "audio"
"""Its prompt is more than two chunks of the tight engines."""
MOST = 100
LENGTH: Sampling = {"max_tokens": MOST, "min_tokens": MOST, "skip_reading_prefix_cache": True}
"""As long as the prompt: requests that were let in together do not fit together to their end."""


async def think(thinker: Stage, name: str, sampling: Sampling) -> StageChunk:
    asked = request(name, KIND, sampling={"thinker": {**LENGTH, **sampling}})
    return await collect(thinker.generate(asked, None))


def to_talker(name: str, sampling: Sampling) -> OmniRequest:
    return request(name, KIND, sampling={"talker": {"repetition_penalty": 1.0, **LENGTH, **sampling}})


async def talk(talker: Stage, fed: list[StageChunk], name: str, sampling: Sampling) -> StageChunk:
    return await collect(talker.generate(to_talker(name, sampling), at_once(fed)))


# ---------------------------------------------------------------- the thinker


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thought(pipeline: AsyncOmniLLM) -> dict[str, tuple[int, ...]]:
    """What each says alone, its prompt in one piece."""
    thinker = pipeline._stages["thinker"]
    return {name: (await think(thinker, name, sampling)).token_ids for name, sampling in SEEDED.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(thought: Any, tight_thinker: Stage) -> Stage:
    return tight_thinker


async def test_a_prompt_in_chunks_changes_nothing(thinker: Stage, thought: dict[str, tuple[int, ...]]) -> None:
    for name, sampling in SEEDED.items():
        assert (await think(thinker, f"chunked-{name}", sampling)).token_ids == thought[name], name
    assert len(set(thought.values())) == len(thought)  # else they would not be drawn


async def test_neighbours_and_preemption_change_nothing(thinker: Stage, thought: dict[str, tuple[int, ...]]) -> None:
    before = (await thinker.counts())["preemptions"]
    beside = [(f"beside-{i}", sampling) for i, sampling in enumerate(NEIGHBOURS)]
    asked = [pair for pairs in zip(SEEDED.items(), [*beside, *beside[:1]], strict=True) for pair in pairs]
    made = await begun_at_once(thinker, [think(thinker, f"{i}-{name}", s) for i, (name, s) in enumerate(asked)])
    for (name, _), chunk in zip(asked, made, strict=True):
        assert chunk.token_ids == thought.get(name, chunk.token_ids), name
    assert (await thinker.counts())["preemptions"] > before
    await until_free(thinker)


async def test_logprobs_are_of_the_models_own_distribution_beside_penalties(thinker: Stage) -> None:
    plain, penalised = [{"temperature": 0, "logprobs": 2, "repetition_penalty": r} for r in (1.0, 1.5)]
    alone = (await think(thinker, "plain", plain)).choices[0].likeliest
    beside = (await think(thinker, "penalised", penalised)).choices[0].likeliest
    assert [one.logprob for one in beside] == pytest.approx([one.logprob for one in alone], abs=1e-4)


# ----------------------------------------------------------------- the talker


@pytest.fixture(scope="module")
def fed(reference: Reference) -> list[StageChunk]:
    return thinker_chunks(reference.thinker(prompt_text(KIND), *media(KIND), max_new_tokens=MAX_TOKENS))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def spoken(pipeline: AsyncOmniLLM, fed: list[StageChunk]) -> dict[str, tuple[int, ...]]:
    """What each says alone, its prompt in one piece."""
    talker = pipeline._stages["talker"]
    return {name: tuple(codes_of(await talk(talker, fed, name, sampling))) for name, sampling in SEEDED.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talker(spoken: Any, tight_talker: Stage) -> Stage:
    return tight_talker


async def test_a_prompt_of_rows_in_chunks_changes_nothing(
    talker: Stage, fed: list[StageChunk], spoken: dict[str, tuple[int, ...]]
) -> None:
    for name, sampling in SEEDED.items():
        assert tuple(codes_of(await talk(talker, fed, f"chunked-{name}", sampling))) == spoken[name], name
    assert len(set(spoken.values())) == len(spoken)


async def test_neighbours_and_preemption_change_no_code(
    talker: Stage, fed: list[StageChunk], spoken: dict[str, tuple[int, ...]]
) -> None:
    before = (await talker.counts())["preemptions"]
    beside = [(f"beside-{i}", sampling) for i, sampling in enumerate(NEIGHBOURS)]
    asked = [pair for pairs in zip(SEEDED.items(), [*beside, *beside[:1]], strict=True) for pair in pairs]
    made = await begun_at_once(talker, [talk(talker, fed, f"{i}-{name}", s) for i, (name, s) in enumerate(asked)])
    for (name, sampling), chunk in zip(asked, made, strict=True):
        assert tuple(codes_of(chunk)) == spoken.get(name, tuple(codes_of(chunk))), name
        assert len(chunk.choices) == (MOST if "logprobs" in sampling else 0)
    assert (await talker.counts())["preemptions"] > before
    await until_free(talker)


async def test_rows_that_come_one_at_a_time_change_no_code(
    talker: Stage, fed: list[StageChunk], spoken: dict[str, tuple[int, ...]]
) -> None:
    names = ("everything", "few", "penalised")
    feeds = [Feed() for _ in names]
    made = [
        asyncio.create_task(collect(talker.generate(to_talker(f"drip-{name}", SEEDED[name]), feed.read())))
        for name, feed in zip(names, feeds, strict=True)
    ]
    for chunk in fed:
        for feed in feeds:
            feed.give(chunk)
        await talker.counts()  # a round trip, in which the engine gets on
    for feed in feeds:
        feed.end()
    for name, chunk in zip(names, await asyncio.gather(*made), strict=True):
        assert tuple(codes_of(chunk)) == spoken[name], name
    await until_free(talker)


async def test_a_neighbours_penalty_costs_no_step(talker: Stage, fed: list[StageChunk]) -> None:
    before = (await talker.counts())["steps"]
    await asyncio.gather(talk(talker, fed, "fast", {}), talk(talker, fed, "beside", {"presence_penalty": 1.0}))
    assert (await talker.counts())["steps"] - before < MOST / 2
