"""Rows of a layer of the model's choice, at the positions of media alone, are those of transformers' whole run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.traits import EngineTraits
from omni_cluster.engine.build import bind
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.stages import Thinker
from omni_cluster.models.qwen2_5_omni.thinker_model import Qwen2_5OmniThinker
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.rows_at import prompt_mask
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import (
    KEPT_ROWS_BYTES,
    THINKER_STEP_TOKENS,
    begun_at_once,
    collect,
    pipeline_config,
    request,
    thinker_stage,
    tight,
    until_free,
)
from tests.reference import Reference, media, prompt_text

pytestmark = pytest.mark.parity
ARCHITECTURE = "ThinkerOfMediaRows"
LAYER = 1
BLOCK = 32
KINDS = ("audio", "image", "audio+image")
UNCACHED: dict[str, Any] = {"thinker": {"skip_reading_prefix_cache": True}}


class ThinkerOfMediaRows(Qwen2_5OmniThinker):
    """The thinker with a buffer of what enters its layer `LAYER`."""

    rows_out: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.language_model.model._set_aux_hidden_state_layers((LAYER,))
        tokens, width = vllm_config.scheduler_config.max_num_batched_tokens, self.config.text_config.hidden_size
        self.register_buffer("rows_out", torch.zeros(tokens, width), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, (rows,) = super().forward(*args, **kwargs)
        self.rows_out[: len(rows)].copy_(rows)
        return hidden


def thinker_config(config: Any) -> Any:
    config.architectures = [ARCHITECTURE]
    return config


ModelRegistry.register_model(ARCHITECTURE, ThinkerOfMediaRows)


class OfMedia(Thinker):
    """The spec of this thinker."""

    rows_kind = "layer 1"
    rows_at = "media"
    has_rows_out = True

    @property
    def traits(self) -> EngineTraits:
        return replace(super().traits, hf_overrides=thinker_config)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(forked_engines: None, tiny: Path) -> AsyncIterator[StageLLM]:
    """Prompts take several steps, and eight requests do not fit into the KV cache at once."""
    handover = HandoverConfig(kept_rows_bytes=KEPT_ROWS_BYTES)
    stage = thinker_stage(**tight(THINKER_STEP_TOKENS), enforce_eager=not torch.cuda.is_available())
    config = pipeline_config(stage, handover=handover)
    family = bind(config).family
    assert isinstance(family, Qwen2_5Omni)
    engine = StageLLM(config.stages[0], config, OfMedia(family), str(tiny))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def entering(reference: Reference) -> dict[str, torch.Tensor]:
    """By kind, what enters the layer at each position of the prompt, in one run of it."""
    return {kind: layer_rows(reference, kind) for kind in ("text", *KINDS)}


@torch.inference_mode()
def layer_rows(reference: Reference, kind: str) -> torch.Tensor:
    inputs = reference._inputs(prompt_text(kind), *media(kind), [])
    made = reference.model.thinker(**inputs, output_hidden_states=True)
    rows: torch.Tensor = made.hidden_states[LAYER][0]
    return rows


def assert_rows(made: StageChunk, entering: torch.Tensor, pads: Sequence[int]) -> None:
    """All media positions have their rows and no other one has, as a reader by absolute position sees it."""
    rows, ids = made.rows, np.array(made.prompt_token_ids)
    assert rows is not None and (rows.kind, rows.start, rows.end) == (OfMedia.rows_kind, 0, len(ids))
    assert rows.positions is not None and rows.positions.shape[1] == len(ids)
    assert rows.at.tolist() == np.flatnonzero(np.isin(ids, pads)).tolist()
    torch.testing.assert_close(rows.tensor(), entering[rows.at], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def pads(reference: Reference) -> list[int]:
    config = reference.model.thinker.config
    return [config.audio_token_id, config.image_token_id]


async def think(thinker: StageLLM, asked: OmniRequest) -> StageChunk:
    return await collect(thinker.generate(asked))


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_of_media_are_those_of_the_whole_run(
    thinker: StageLLM, entering: dict[str, torch.Tensor], pads: list[int], kind: str
) -> None:
    made = await think(thinker, request(f"computed-{kind}", kind, sampling=UNCACHED))
    assert len(made.prompt_token_ids or ()) > THINKER_STEP_TOKENS
    assert_rows(made, entering[kind], pads)
    again = await think(thinker, request(f"cached-{kind}", kind))
    assert again.cached_tokens >= BLOCK
    assert_rows(again, entering[kind], pads)


async def test_a_prompt_without_media_has_no_rows_and_its_blocks_are_cached_for_all(
    thinker: StageLLM, entering: dict[str, torch.Tensor], pads: list[int]
) -> None:
    await think(thinker, request("silent", wants_audio=False))
    made = await think(thinker, request("text"))
    assert_rows(made, entering["text"], pads)
    assert made.cached_tokens >= BLOCK and len(made.rows.raw if made.rows else [0]) == 0


async def test_rows_of_media_survive_preemption(
    thinker: StageLLM, entering: dict[str, torch.Tensor], pads: list[int]
) -> None:
    before = (await thinker.counts())["preemptions"]
    kinds = [*KINDS, *KINDS]
    crowd = [think(thinker, request(f"crowd-{i}", kind)) for i, kind in enumerate(kinds)]
    for kind, made in zip(kinds, await begun_at_once(thinker, crowd), strict=True):
        assert_rows(made, entering[kind], pads)
    assert (await thinker.counts())["preemptions"] > before
    await until_free(thinker)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_is_begun_again_has_its_rows_again(
    thinker: StageLLM, entering: dict[str, torch.Tensor], pads: list[int], kind: str
) -> None:
    first = await think(thinker, request(f"lost-{kind}", kind))
    for cut in (1, len(first.token_ids) - 1):
        known = {"thinker": KnownOutput(first.token_ids[:cut])}
        made = await think(thinker, request(f"again-{kind}-{cut}", kind, known=known))
        assert made.token_ids == first.token_ids
        assert_rows(made, entering[kind], pads)


async def test_a_step_that_only_decodes_brings_no_rows(thinker: StageLLM) -> None:
    chunks = [chunk async for chunk in thinker.generate(request("decoded", "audio"))]
    assert sum(chunk.rows is not None for chunk in chunks if chunk.token_start) == 0


def feature(offset: int, length: int, is_embed: list[int] | None = None) -> MultiModalFeatureSpec:
    mask = None if is_embed is None else torch.tensor(is_embed, dtype=torch.bool)
    return MultiModalFeatureSpec(None, "audio", "name", PlaceholderRange(offset, length, mask))


def test_the_mask_of_a_prompt_has_its_media() -> None:
    places = [feature(1, 2), feature(4, 4, [0, 1, 1, 0])]
    assert prompt_mask("all", 9, places) is None
    prompt, of_media = prompt_mask("prompt", 9, places), prompt_mask("media", 9, places)
    assert prompt is not None and prompt.tolist() == [True] * 9
    assert of_media is not None and np.flatnonzero(of_media).tolist() == [1, 2, 5, 6]
