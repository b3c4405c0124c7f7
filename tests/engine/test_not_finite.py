"""Values that are infinite or no numbers end their own request, and reach no other, in any stage."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace as replaced
from safetensors.torch import load_file, save_file

from omni_cluster.config.handover import HandoverConfig
from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import NotFinite, RequestError
from omni_cluster.types.inputs import Media
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows
from tests.codes import codes_of
from tests.engine.stages import (
    KEPT_ROWS_BYTES,
    THINKER_STEP_TOKENS,
    at_once,
    collect,
    pipeline_config,
    request,
    running,
    thinker_chunks,
    thinker_stage,
    tight,
    until_free,
)
from tests.reference import Reference, media, prompt_text, synthetic_audio

POISON = "~"
"""Its embedding is no number in the poisoned checkpoint."""
EMBEDDINGS = "thinker.model.embed_tokens.weight"
POISON_TOKEN = 93
UNSAID = {"thinker": {"logit_bias": {POISON_TOKEN: -100}}}
"""The model would say it by itself: its weights are random."""
POOL_BLOCKS = 12
NEIGHBOURS = 8


@pytest.fixture(scope="module")
def poisoned(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned") / "checkpoint"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    assert FileTokenizer(folder).backend_tokenizer.encode(POISON).ids == [POISON_TOKEN]
    weights[EMBEDDINGS][POISON_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(poisoned: Path) -> AsyncIterator[Stage]:
    """Prompts need several steps, and its pool has few pages."""
    config = pipeline_config(
        thinker_stage(**tight(THINKER_STEP_TOKENS)), handover=HandoverConfig(kept_rows_bytes=KEPT_ROWS_BYTES)
    ).model_copy(update={"model": str(poisoned)})
    async with running(config, "thinker") as stage:
        yield stage


async def said(thinker: Stage, name: str, question: str, *, wants_audio: bool = False) -> tuple[int, ...]:
    asked = request(name, "text", sampling=UNSAID, wants_audio=wants_audio)
    asked = replace(asked, prompt=prompt_text("text", question))
    return (await collect(thinker.generate(asked, None))).token_ids


def question(number: int) -> str:
    return f"Question {number}: what do you see and hear, and what is it about?"


@pytest.mark.full
@pytest.mark.parametrize("wants_audio", [False, True])
@pytest.mark.parametrize("filling", ["", "long " * 20], ids=["one step", "several steps"])
async def test_a_thinkers_request_ends_by_itself_and_its_neighbours_go_on(
    thinker: Stage, wants_audio: bool, filling: str
) -> None:
    before = [await said(thinker, f"before-{i}", question(i), wants_audio=wants_audio) for i in range(NEIGHBOURS)]
    broken = said(thinker, "broken", f"{POISON} {filling}", wants_audio=wants_audio)
    beside = [said(thinker, f"beside-{i}", question(i), wants_audio=wants_audio) for i in range(NEIGHBOURS)]
    ended, *made = await asyncio.gather(broken, *beside, return_exceptions=True)
    assert isinstance(ended, NotFinite) and "stage thinker" in str(ended)
    assert made == before
    await until_free(thinker)
    for i in range(2 * POOL_BLOCKS):  # each page passes to another request
        after = await said(thinker, f"after-{i}", question(i % NEIGHBOURS), wants_audio=wants_audio)
        assert after == before[i % NEIGHBOURS]


@pytest.mark.full
async def test_a_page_that_its_request_left_before_its_end_is_cleared(thinker: Stage) -> None:
    """The client leaves with the first rows, before any step has told of the rest."""
    before = [await said(thinker, f"left-before-{i}", question(i)) for i in range(NEIGHBOURS)]
    for i in range(POOL_BLOCKS):
        long = replace(
            request(f"left-{i}", "text"), prompt=prompt_text("text", f"{i} " + "words and " * 15 + POISON * 20)
        )
        chunks = thinker.generate(long, None)
        with contextlib.suppress(NotFinite):  # on a busy machine the end may be there with the first rows
            await anext(chunks)
        await chunks.aclose()
    await until_free(thinker)
    made = await asyncio.gather(*(said(thinker, f"left-after-{i}", question(i)) for i in range(NEIGHBOURS)))
    assert list(made) == before


@pytest.mark.full
async def test_the_prefix_cache_keeps_no_block_of_a_request_that_ended_so(thinker: Stage) -> None:
    start = "The same beginning of a prompt, long enough for a block of it and for one more after that. "
    before = await said(thinker, "clean-before", start)
    for i in range(3):
        with pytest.raises(NotFinite):
            await said(thinker, f"cached-{i}", start + POISON)
    assert await said(thinker, "clean-after", start) == before


async def test_a_talkers_request_ends_by_itself_and_its_neighbours_go_on(
    tight_talker: Stage, reference: Reference
) -> None:
    chunks = thinker_chunks(reference.thinker(prompt_text("text"), *media("text"), max_new_tokens=16))

    async def codes(name: str, given: list[StageChunk]) -> list[int]:
        return codes_of(await collect(tight_talker.generate(request(name), at_once(given))))

    before = await codes("before", chunks)
    # In the prompt, in the first and in a later token's row.
    for place, value in ((0, torch.nan), (1, torch.inf), (5, -torch.inf)):
        beside = [codes(f"beside-{i}", chunks) for i in range(3)]
        ended, *made = await asyncio.gather(
            codes("broken", broken_at(chunks, place, value)), *beside, return_exceptions=True
        )
        assert isinstance(ended, NotFinite) and "stage talker" in str(ended)
        assert made == [before] * 3
    for i in range(POOL_BLOCKS):
        assert await codes(f"after-{i}", chunks) == before


def broken_at(chunks: list[StageChunk], place: int, value: float) -> list[StageChunk]:
    rows = chunks[place].rows
    assert rows is not None
    values = rows.tensor().clone()
    values[-1, 3] = value
    broken = replaced(chunks[place], rows=Rows.of(rows.kind, rows.start, values, rows.positions))
    return [*chunks[:place], broken, *chunks[place + 1 :]]


async def test_sound_too_loud_to_be_computed_with_is_refused(tight_thinker: Stage) -> None:
    loud = (synthetic_audio().astype(np.float64) * 1e30).astype(np.float32)
    asked = replace(request("loud", "audio"), media=Media(audios=(loud,)))
    with pytest.raises(RequestError, match="more energy than can be computed with"):
        await collect(tight_thinker.generate(asked, None))
