"""Code2wav's own engine, with vLLM's worker around the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.engine.sound.engine import SoundEngine
from omni_cluster.models.registry import known_families
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import TokenError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import PATIENCE_S, Feed, at_once, running, until


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(qwen3_folder: Path) -> AsyncIterator[SoundEngine]:
    config = load_config(STAGE_CONFIGS / "qwen3_omni_tiny.yaml", known_families=known_families())
    async with running(config.model_copy(update={"model": str(qwen3_folder)}), "code2wav") as stage:
        assert isinstance(stage, SoundEngine)
        yield stage


def codes_of(count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (count, 4)).astype(np.int16)


def whole(model: Any, codes: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.code2wav(torch.from_numpy(codes.astype(np.int64)).T[None])[0, 0].numpy()


async def sound(engine: SoundEngine, name: str, upstream: AsyncIterator[StageChunk], streams: bool) -> np.ndarray:
    request, waves, end = OmniRequest(name, "", streams_audio=streams), [], 0
    async for chunk in engine.generate(request, upstream):
        if chunk.audio is not None:
            assert chunk.audio.start == end
            end = chunk.audio.end
            waves.append(chunk.audio.samples)
    return np.concatenate(waves)


async def test_long_sound_whole_and_streamed_is_one_decode(engine: SoundEngine, qwen3_reference: Any) -> None:
    asked = [(codes_of(count, seed), streams) for seed, (count, streams) in enumerate([(320, True), (310, False)])]
    made = await asyncio.gather(
        *(
            sound(engine, f"long-{streams}", at_once([StageChunk(codes=Codes.of(0, codes))]), streams)
            for codes, streams in asked
        )
    )
    for wave, (codes, _) in zip(made, asked, strict=True):
        np.testing.assert_allclose(wave, whole(qwen3_reference, codes), atol=1e-5, rtol=0)


async def test_sound_begins_with_the_first_two_codes(engine: SoundEngine, qwen3_reference: Any) -> None:
    codes = codes_of(12, 5)
    feed = Feed(StageChunk(codes=Codes.of(0, codes[:2])))
    chunks = engine.generate(OmniRequest("first", "", streams_audio=True), feed.read())
    first = await asyncio.wait_for(anext(chunks), PATIENCE_S)
    assert first.audio is not None
    feed.give(StageChunk(codes=Codes.of(2, codes[2:])))
    feed.end()
    rest = [chunk.audio.samples async for chunk in chunks if chunk.audio is not None]
    assert len(first.audio.samples) == 2 * 1_920 - 555
    joined = np.concatenate([first.audio.samples, *rest])
    np.testing.assert_allclose(joined, whole(qwen3_reference, codes), atol=1e-5, rtol=0)


async def test_what_is_no_code_ends_its_request_alone_and_leaves_nothing(engine: SoundEngine) -> None:
    bad = at_once([StageChunk(codes=Codes.of(0, codes_of(40, 6))), StageChunk(codes=Codes.of(40, [[1, 2, 3, 256]]))])
    with pytest.raises(TokenError, match="token 256 is no code of sound; codes are 0 to 255"):
        await sound(engine, "bad", bad, True)

    async def is_free() -> bool:
        counts = await engine.counts()
        return not (counts["streams"] or counts["running"] or counts["waiting"])

    await until(is_free)
