"""A checkpoint whose files have names and no values: engines that draw these say what those of its files do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.engine.build import bind
from omni_cluster.engine.fitting import memory_plan
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.memory.sizes import GIB, WeightGroup, weight_bytes
from omni_cluster.models.checkpoint_files import load_tensors
from omni_cluster.models.checkpoint_maker import count_by_part, write_in_part
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen3_omni.checkpoint import _weights, drawn, make_checkpoint
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ConfigError
from omni_cluster.types.inputs import OmniRequest
from tests.models.qwen3_omni.thinker_reference import media_of, prompt_text
from tests.models.qwen3_omni.whole_reference import MAX_CODES, MAX_TOKENS, Reference
from tests.pages import ROOT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def headers(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with values of code2wav alone."""
    folder = tmp_path_factory.mktemp("drawn")
    for file in qwen3_folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    write_in_part(
        _weights(), lambda weight: weight.name.startswith("code2wav."), lambda weight: drawn(weight, CPU), folder, print
    )
    return folder


@pytest.mark.full
@pytest.mark.parity
async def test_drawn_engines_say_what_transformers_does_of_the_files(
    forked_engines: None, headers: Path, qwen3_folder: Path, qwen3_reference: Any
) -> None:
    config = load_config(STAGE_CONFIGS / "qwen3_omni_tiny.yaml", known_families=known_families())
    stages = [
        stage.model_copy(update={"engine_args": {**stage.engine_args, "load_format": "drawn"}})
        if stage.model_stage != "code2wav"
        else stage
        for stage in config.stages
    ]
    omni = AsyncOmniLLM(config.model_copy(update={"stages": stages, "model": str(headers)}))
    await omni.start()
    try:
        sampling = {"thinker": {"max_tokens": MAX_TOKENS}, "talker": {"max_tokens": MAX_CODES}}
        request = OmniRequest("drawn", prompt_text("image"), media_of("image"), True, "ethan", sampling)
        made = await omni.generate(request)
    finally:
        await omni.shutdown()
    wanted = Reference(qwen3_folder, qwen3_reference).speak("image", "ethan")
    assert list(made.token_ids) == wanted.token_ids and made.codes is not None
    assert made.codes.values.tolist() == wanted.codes.tolist()


def test_values_that_are_there_are_those_of_the_files(headers: Path, qwen3_folder: Path) -> None:
    made, wanted = (load_tensors(folder, "code2wav.", CPU) for folder in (headers, qwen3_folder))
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in made)


def test_a_family_that_draws_none_says_so() -> None:
    with pytest.raises(ConfigError, match="load_format is 'drawn', but family qwen2_5_omni draws no weights"):
        Qwen2_5Omni.drawn(_weights()[0], CPU)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("30b", tmp_path_factory.mktemp("large") / "30b", device="cpu").path


def test_the_large_one_has_the_hubs_sizes_and_takes_little_of_the_disk(large: Path) -> None:
    parts = count_by_part(_weights("30b"))
    assert {name: round(count / 1e9, 3) for name, count in parts.items()} == {
        "thinker": 31.719, "talker": 3.325, "code2wav": 0.216,
    }  # fmt: skip
    for part, count in parts.items():
        assert weight_bytes(large, (WeightGroup(f"{part}."),), 2, 1) == 2 * count
    assert sum(file.stat().st_blocks * 512 for file in large.iterdir()) < 1 << 30


@pytest.mark.parametrize(
    ("name", "card_gib"), [("one_gpu", 139), ("one_gpu_low_precision", 79), ("two_gpus", 79), ("four_gpus", 79)]
)
def test_the_large_one_fits_the_cards_of_its_configurations(large: Path, name: str, card_gib: int) -> None:
    config = load_config(STAGE_CONFIGS / f"qwen3_omni_{name}.yaml", known_families=known_families())
    plan = memory_plan(bind(config.model_copy(update={"model": str(large)})), card_gib * GIB)
    assert all(plan.taken(card) <= card.usable for card in plan.cards)
    thinker, talker, _ = plan.engines.values()
    # At least eight conversations of 4,096 tokens of the thinker, of which one takes 96 KiB a token.
    assert thinker.kv_cache > 8 * 4096 * 96 * 1024 // (2 if name == "four_gpus" else 1)
    assert talker.kv_cache > 8 * 4096 * 20 * 1024


def table_of_memory() -> dict[str, list[tuple[float, ...]]]:
    """Weights, KV cache and all of each stage that the page has of a file in `stage_configs/`."""
    section = (ROOT / "docs/models/qwen3_omni.md").read_text().split("\n## Cards and memory\n")[1].split("\n## ")[0]
    made: dict[str, list[tuple[float, ...]]] = {}
    for line in section.splitlines():
        if not line.startswith("| `") and not line.startswith("| | |"):
            continue
        file, _, _, *figures = (cell.strip(" `") for cell in line.strip("|").split("|"))
        of_file = made.setdefault(file, []) if file else list(made.values())[-1]
        of_file.extend([tuple(map(float, figures))] if all(figures) else [])
    return made


def test_the_page_has_the_memory_of_each_configuration_for_cards(large: Path) -> None:
    told = table_of_memory()
    files = {path.name for path in STAGE_CONFIGS.glob("qwen3_omni*.yaml")}
    assert files - told.keys() == {"qwen3_omni_tiny.yaml"}
    for name, figures in told.items():
        config = load_config(STAGE_CONFIGS / name, known_families=known_families())
        card_gib = 139 if name == "qwen3_omni_one_gpu.yaml" else 79
        engines = memory_plan(bind(config.model_copy(update={"model": str(large)})), card_gib * GIB).engines.values()
        planned = [tuple(round(part / GIB, 1) for part in (e.fixed.weights, e.kv_cache, e.total)) for e in engines]
        assert planned == (figures or told["qwen3_omni_two_gpus.yaml"])


def test_experts_that_are_quantized_are_counted_so(large: Path) -> None:
    thinker = (WeightGroup("thinker."),)
    whole, quantized = (weight_bytes(large, thinker, 2, 1, expert_bytes) for expert_bytes in (None, 1))
    assert whole - quantized == 48 * 128 * 3 * 2048 * 768
