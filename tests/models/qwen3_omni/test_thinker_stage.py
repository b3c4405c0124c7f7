from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.memory.sizes import weight_bytes
from omni_cluster.models.family import ARSession, EngineInput
from omni_cluster.models.qwen3_omni.thinker_stage import Thinker, thinker_sizes
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest
from tests.engine.stages import at_once, thinker_stage
from tests.models.qwen3_omni.thinker_engine import OfFolder
from tests.models.qwen3_omni.thinker_reference import media_of

ALL_MEDIA = {
    "audio": Media(audios=(np.zeros(1600, np.float32),)),
    "image": media_of("image"),
    "video": media_of("video"),
}


@pytest.fixture
def spec(qwen3_folder: Path) -> Thinker:
    return Thinker(OfFolder(qwen3_folder))


async def never(_: object) -> int:
    raise AssertionError("the thinker holds nothing")


def session(spec: Thinker, request: OmniRequest) -> ARSession:
    return spec.session(request, at_once([]), never)


async def asked(spec: Thinker, request: OmniRequest) -> EngineInput:
    made = await session(spec, request).prompt()
    assert made is not None
    return made


@pytest.mark.parametrize("kind", ALL_MEDIA)
async def test_requests_with_media_that_want_sound_have_rows(spec: Thinker, kind: str) -> None:
    request = OmniRequest("r", "Hello", ALL_MEDIA[kind])
    assert (await asked(spec, request)).emit_rows
    assert not (await asked(spec, replace(request, wants_audio=False))).emit_rows


async def test_requests_without_media_have_none(spec: Thinker) -> None:
    assert not (await asked(spec, OmniRequest("r", "Hello"))).emit_rows
    given = await asked(spec, OmniRequest("r", "ab", reply="c"))
    assert not given.emit_rows and given.given_reply is not None and given.given_reply.text == "c"


@pytest.mark.parametrize("kind", ["audio", "text"])
async def test_of_an_answer_that_is_all_there_rows_and_the_prompts_ids_alone_are_asked_for(
    spec: Thinker, kind: str
) -> None:
    known = {"thinker": KnownOutput((1, 2), finish_reason="stop")}
    request = OmniRequest("r", "Hello", ALL_MEDIA.get(kind, Media()), known=known)
    made = await asked(spec, request)
    assert (made.sampling["max_tokens"], made.emit_rows) == (1, kind == "audio")
    assert await session(spec, replace(request, wants_audio=False)).prompt() is None


async def test_no_rows_are_made_for_a_talker_that_has_ended(spec: Thinker) -> None:
    known = {"thinker": KnownOutput((1,)), "talker": KnownOutput(finish_reason="stop")}
    assert not (await asked(spec, OmniRequest("r", "Hello", ALL_MEDIA["audio"], known=known))).emit_rows


def test_the_stage_emits_rows_of_media_that_the_model_writes(spec: Thinker) -> None:
    assert spec.emits_rows and spec.rows_at == "media" and spec.has_rows_out and spec.traits.tool_parser == "hermes"


def test_sizes_are_the_checkpoints(spec: Thinker, qwen3_folder: Path, qwen3_reference: Any) -> None:
    sizes = spec.sizes(thinker_stage())
    assert sizes == thinker_sizes(qwen3_folder)
    assert (sizes.num_layers, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (6, 4, 2, 32)
    assert sizes.intermediate_size == 2 * 32  # of the experts of a token
    assert sizes.buffers_size == 3 * 64 + 2 * 32
    eye, ear = sizes.towers
    assert (eye.max_tokens, eye.output_size, ear.max_tokens, ear.output_size) == (64, 4 * 64, 390, 64)
    elements = sum(parameter.numel() for parameter in qwen3_reference.thinker.parameters())
    assert weight_bytes(qwen3_folder, sizes.weights, 2, 1) == 2 * elements
