"""LoRA adapters of the thinker's attention: each request has the answer of its own one, beside any other request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.engine.build import bind, check_stages
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.lora import adapter_elements, read_adapters
from omni_cluster.models.qwen3_omni.thinker_stage import Thinker
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import AdapterError
from omni_cluster.types.inputs import KnownOutput
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.adapters import merged, write_adapter
from tests.engine.stages import MAX_TOKENS, begun_at_once, shortened, thinker_stage
from tests.models.qwen3_omni.thinker_engine import pipeline_config
from tests.models.qwen3_omni.thinker_reference import ThinkerReference, Thought, media_of, prompt_text, request
from tests.models.qwen3_omni.thinking import assert_equal, assert_rows, think
from tests.models.qwen3_omni.whole_reference import MAX_CODES, Reference

NAMES = ("", "a", "b")
"""The checkpoint alone, and its adapters."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
UNCACHED = {"thinker": {"skip_reading_prefix_cache": True}}


@dataclass
class Adapted:
    """The adapters, and transformers with each of them in its weights."""

    folders: dict[str, str]
    models: dict[str, tuple[Path, Any]]

    def thought(self, name: str, kind: str) -> Thought:
        return ThinkerReference(*self.models[name]).think(prompt_text(kind), media_of(kind), MAX_TOKENS)


@pytest.fixture(scope="module")
def adapted(qwen3_folder: Path, qwen3_reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    # Unlike in rank, in what they change and in whose names they have.
    a = write_adapter(folder / "a", qwen3_folder, seed=1, rank=4, projections=ATTENTION)
    b = write_adapter(folder / "b", qwen3_folder, seed=4, rank=9, projections=("q_proj", "o_proj"), whole_model=False)
    models = {"": (qwen3_folder, qwen3_reference)}
    for path in (a, b):
        whole = merged(path, qwen3_folder, folder / f"of-{path.name}")
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(whole, dtype=torch.float32).eval()
        models[path.name] = (whole, model)
    return Adapted({"a": str(a), "b": str(b)}, models)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speaking(forked_engines: None, qwen3_folder: Path, adapted: Adapted) -> AsyncIterator[AsyncOmniLLM]:
    config = load_config(STAGE_CONFIGS / "qwen3_omni_tiny.yaml", known_families=known_families())
    thinker, *others = map(shortened, config.stages)
    stages = [thinker.model_copy(update={"lora_adapters": adapted.folders}), *others]
    omni = AsyncOmniLLM(config.model_copy(update={"stages": stages, "model": str(qwen3_folder)}))
    await omni.start()
    yield omni
    await omni.shutdown()


@pytest.fixture
def thinker(speaking: AsyncOmniLLM) -> StageLLM:
    return cast(StageLLM, speaking._stages["thinker"])


@pytest.mark.full
@pytest.mark.parity
def test_each_adapter_has_an_answer_of_its_own(adapted: Adapted) -> None:
    for kind in ("text", "audio", "image", "audio+image"):
        answers = [adapted.thought(name, kind) for name in NAMES]
        assert len({tuple(answer.token_ids) for answer in answers}) == len(NAMES)
        assert min(answer.min_margin for answer in answers) > 1e-3


@pytest.mark.full
@pytest.mark.parity
@pytest.mark.parametrize("kind", ["text", "audio+image"])
@pytest.mark.parametrize("name", NAMES)
async def test_tokens_and_rows_are_those_of_merged_weights(
    thinker: StageLLM, adapted: Adapted, name: str, kind: str
) -> None:
    wanted = adapted.thought(name, kind)
    made = await think(thinker, request(f"alone-{name}-{kind}", kind, adapter=name, sampling=UNCACHED))
    assert_equal(made, wanted)
    if kind != "text":
        assert_rows(made, wanted)


@pytest.mark.full
@pytest.mark.parity
async def test_adapters_beside_each_other_in_a_batch(thinker: StageLLM, adapted: Adapted) -> None:
    asked = [request(f"beside-{number}", "image", adapter=NAMES[number % 3]) for number in range(6)]
    before = (await thinker.counts())["steps"]
    made = await begun_at_once(thinker, [think(thinker, each) for each in asked])
    assert (await thinker.counts())["steps"] - before < 2 * MAX_TOKENS + len(asked)  # six at once, not in turns
    for each, answer in zip(asked, made, strict=True):
        wanted = adapted.thought(each.adapter, "image")
        assert_equal(answer, wanted)
        assert_rows(answer, wanted)


@pytest.mark.full
@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
async def test_a_request_that_is_begun_again_goes_on_with_its_adapter(
    thinker: StageLLM, adapted: Adapted, name: str
) -> None:
    wanted = adapted.thought(name, "audio")
    known = {"thinker": KnownOutput(tuple(wanted.token_ids[: MAX_TOKENS // 2]))}
    made = await think(thinker, request(f"again-{name}", "audio", adapter=name, known=known))
    assert_equal(made, wanted)
    assert_rows(made, wanted)


@pytest.mark.full
@pytest.mark.parity
async def test_codes_are_those_of_merged_weights(speaking: AsyncOmniLLM, adapted: Adapted) -> None:
    """The talker is the same for all, and each says what its own thinker thinks of the picture."""
    sampling = {"thinker": {"max_tokens": MAX_TOKENS}, "talker": {"max_tokens": MAX_CODES}}
    asked = [request(f"said-{n}", "audio+image", adapter=n, voice="ethan", sampling=sampling) for n in NAMES]
    made = await asyncio.gather(*map(speaking.generate, asked))
    wanted = [Reference(*adapted.models[name]).speak("audio+image", "ethan") for name in NAMES]
    for answer, spoken in zip(made, wanted, strict=True):
        assert list(answer.token_ids) == spoken.token_ids
        assert answer.codes is not None
        np.testing.assert_array_equal(answer.codes.values, spoken.codes)
    assert len({spoken.codes.tobytes() for spoken in wanted}) == len(NAMES)


# ------------------------------------------------------------ what an adapter may change


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_adapters_of_experts_are_refused_in_one_sentence(qwen3_folder: Path, tmp_path: Path, projection: str) -> None:
    folder = write_adapter(tmp_path / "adapter", qwen3_folder, projections=("q_proj", projection))
    stage = thinker_stage().model_copy(update={"lora_adapters": {"support": str(folder)}})
    config = pipeline_config(qwen3_folder).model_copy(update={"stages": [stage]})
    with pytest.raises(AdapterError) as refused:
        check_stages(config)
    said = str(refused.value)
    assert f".mlp.experts.0.{projection}.lora_A.weight; an adapter may change only linear layers below " in said
    below = "layers.*.self_attn."
    assert said.endswith(f"base_model.model.thinker.model.{below} or base_model.model.model.{below}.")


@pytest.mark.parametrize("whole_model", [True, False])
def test_adapters_of_attention_fit_the_checkpoint_and_are_counted(
    qwen3_folder: Path, tmp_path: Path, whole_model: bool
) -> None:
    folder = write_adapter(tmp_path / "a", qwen3_folder, projections=("k_proj",), whole_model=whole_model)
    stage = thinker_stage().model_copy(update={"lora_adapters": {"support": str(folder)}})
    config = pipeline_config(qwen3_folder).model_copy(update={"stages": [stage]})
    assert bind(config).config.adapters == ["support"]
    (adapter,) = read_adapters(stage, Thinker.lora_prefixes)
    modules = {f"thinker.model.layers.{layer}.self_attn.k_proj": (64, 2 * 32) for layer in range(6)}
    assert adapter.changes == modules
    assert adapter_elements(stage, Thinker.lora_prefixes, qwen3_folder) == 6 * (64 + 64) * 8
