"""Adapters' folders: what a stage cannot take is refused before an engine starts, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.lora import MaxLoRARanks

from omni_cluster.cli import BAD_INPUT, main
from omni_cluster.config.lora import LORA_RANKS
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, check_stages
from omni_cluster.engine.fitting import needs_of
from omni_cluster.memory.sizes import GIB
from omni_cluster.models.lora import CONFIG_NAME, WEIGHTS_NAME, adapter_elements, check_fit, read_adapters
from omni_cluster.models.qwen2_5_omni.stages import Thinker
from omni_cluster.types.errors import AdapterError, ConfigError
from omni_cluster.vllm_engine.lora import check_features, lora_args
from tests.adapters import write_adapter
from tests.configs import TINY_CONFIG
from tests.engine.stages import pipeline_config, talker_stage, thinker_stage

FIRST = "base_model.model.thinker.model.layers.0.self_attn.q_proj"


def adapted(folder: Path, **engine_args: Any) -> StageConfig:
    return thinker_stage(**engine_args).model_copy(update={"lora_adapters": {"support": str(folder)}})


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / CONFIG_NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """By what is put behind the name of the first module; None takes a tensor away."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        for name, tensor in changes.items():
            tensors.pop(f"{FIRST}.{name}.weight", None)
            if tensor is not None:
                tensors[f"{FIRST}.{name}.weight"] = tensor
        save_file(tensors, folder / WEIGHTS_NAME)

    return change


def with_name(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file({**load_file(folder / WEIGHTS_NAME), name: torch.zeros(4, 128)}, folder / WEIGHTS_NAME)

    return change


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced_by(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut_off(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-8])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (gone(CONFIG_NAME), "which has no adapter_config.json; name a folder in PEFT's format."),
    "no weights": (gone(WEIGHTS_NAME), "which has no adapter_model.safetensors; name a folder in PEFT's format."),
    "no JSON": (replaced_by(CONFIG_NAME, b"{"), "whose adapter_config.json is no JSON; write it again."),
    "no text": (replaced_by(CONFIG_NAME, b"\xff{}"), "whose adapter_config.json is no JSON; write it again."),
    "a list": (replaced_by(CONFIG_NAME, b"[]"), "whose adapter_config.json is of no LoRA adapter"),
    "another kind": (with_config(peft_type="IA3"), "is of no LoRA adapter; name one with peft_type LORA."),
    "no rank": (with_config(r=None), "has the rank None; it should be a whole number above 0."),
    "a rank of words": (with_config(r="8"), "has the rank '8'; it should be a whole number above 0."),
    "a rank of a pattern": (with_config(rank_pattern={"q_proj": 0}), "has the rank 0; it should be"),
    "a wrong pattern": (with_config(rank_pattern=[1]), "has the rank [1]; it should be"),
    "another rank": (with_config(r=8), "down_proj has rank 4, but its adapter_config.json says 8; name a whole one."),
    "no safetensors": (replaced_by(WEIGHTS_NAME, b"PK\x03\x04 and so on, for long"), "is no safetensors file"),
    "an empty file": (replaced_by(WEIGHTS_NAME, b""), "is no safetensors file; write it again."),
    "cut off": (cut_off, "whose adapter_model.safetensors is cut off; copy it again."),
    "nothing": (lambda folder: save_file({}, folder / WEIGHTS_NAME), "has no weights; name a trained adapter."),
    "half": (with_tensors(lora_B=None), "q_proj lacks lora_B; name a whole adapter."),
    "a vector": (with_tensors(lora_A=torch.zeros(4)), "lora_A.weight is [4]; it should have two dimensions."),
    "unlike halves": (with_tensors(lora_B=torch.zeros(128, 3)), "q_proj has rank 4, but"),
    "an encoder": (
        with_name("base_model.model.thinker.visual.blocks.0.attn.q.lora_A.weight"),
        "which changes base_model.model.thinker.visual.blocks.0.attn.q.lora_A.weight; an adapter may change only "
        "linear layers below base_model.model.thinker.model.layers. or base_model.model.model.layers..",
    ),
    "an embedding": (with_name("base_model.model.thinker.model.embed_tokens.lora_embedding_A"), "may change only"),
    "a magnitude": (with_name(f"{FIRST}.lora_magnitude_vector"), "may change only linear layers below"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_folder_is_refused_in_one_sentence(tiny: Path, tmp_path: Path, name: str) -> None:
    break_it, wanted = BROKEN[name]
    folder = write_adapter(tmp_path / "adapter", tiny)
    check_stages(pipeline_config(adapted(folder)))
    break_it(folder)
    with pytest.raises(AdapterError) as refused:
        check_stages(pipeline_config(adapted(folder)))
    said = str(refused.value)
    assert said.startswith(f"stage 0 (thinker): advanced.lora_adapters.support is {str(folder)!r}, wh")
    assert wanted in said and "\n" not in said and isinstance(refused.value, ConfigError)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"support is '.*none', which has no adapter_config\.json; "):
        read_adapters(adapted(tmp_path / "none"), Thinker.lora_prefixes)


@pytest.mark.parametrize(
    ("engine_args", "rank", "wanted"),
    [
        ({"max_lora_rank": 8}, 9, r"whose rank is 9, and engine_args\.max_lora_rank is 8; set that higher\."),
        ({}, 513, r"whose rank is 513, and the largest that vLLM takes is 512; name one of a lower rank\."),
    ],
)
def test_a_rank_above_the_limit_is_refused(
    tiny: Path, tmp_path: Path, engine_args: dict[str, int], rank: int, wanted: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny, rank=rank, projections=("k_proj",))
    with pytest.raises(AdapterError, match=wanted):
        check_stages(pipeline_config(adapted(folder, **engine_args)))


def test_a_stage_whose_model_takes_none_refuses_them(tiny: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny)
    talker = talker_stage().model_copy(update={"lora_adapters": {"support": str(folder)}})
    wanted = r"^stage 1 \(talker\): advanced\.lora_adapters\.support is set, but the model of this stage takes no LoRA"
    with pytest.raises(AdapterError, match=wanted):
        check_stages(pipeline_config(talker=talker))


def test_an_adapter_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny)
    config = pipeline_config(adapted(folder))
    assert bind(config).config.adapters == ["support"]
    with_tensors(lora_A=torch.zeros(4, 64))(folder)
    wanted = r"whose thinker\.model\.layers\.0\.self_attn\.q_proj is \[128, 64\], but the checkpoint's is \[128, 128\]"
    with pytest.raises(AdapterError, match=wanted):
        bind(config)
    with_tensors(lora_A=None, lora_B=None)(folder)
    for half, shape in (("A", (4, 128)), ("B", (128, 4))):
        name = f"base_model.model.thinker.model.layers.99.self_attn.q_proj.lora_{half}.weight"
        save_file({**load_file(folder / WEIGHTS_NAME), name: torch.zeros(shape)}, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterError, match=r"layers\.99\.self_attn\.q_proj is \[128, 128\], but .* is not there; "):
        bind(config)


def test_weights_that_are_packed_do_not_say_how_wide_they_are(tiny: Path, tmp_path: Path) -> None:
    stage = adapted(write_adapter(tmp_path / "adapter", tiny))
    plain = load_file(tiny / "model.safetensors")
    packed = {
        name.replace("proj.weight", "proj.qweight"): tensor[:, :1].contiguous() if "proj.weight" in name else tensor
        for name, tensor in plain.items()
    }
    save_file(packed, tmp_path / "model.safetensors")
    check_fit(read_adapters(stage, Thinker.lora_prefixes), tmp_path)
    elements = [adapter_elements(stage, Thinker.lora_prefixes, folder) for folder in (tiny, tmp_path)]
    assert elements[0] == elements[1] > 0


def test_kinds_that_vllm_does_not_compute_are_refused_before_an_engine_starts(tiny: Path, tmp_path: Path) -> None:
    stage = adapted(write_adapter(tmp_path / "adapter", tiny, use_dora=True))
    with pytest.raises(AdapterError, match=r"adapter', which vLLM refuses: vLLM does not yet support DoRA\.$"):
        check_features(stage, read_adapters(stage, Thinker.lora_prefixes))


def test_engine_arguments_hold_what_the_adapters_are(tiny: Path, tmp_path: Path) -> None:
    folders = {
        "a": str(write_adapter(tmp_path / "a", tiny, rank=4, projections=("q_proj",))),
        "b": str(write_adapter(tmp_path / "b", tiny, rank=9, projections=("q_proj", "o_proj"), whole_model=False)),
    }
    stage = thinker_stage().model_copy(update={"lora_adapters": folders})
    made = lora_args(stage, read_adapters(stage, Thinker.lora_prefixes))
    assert made == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "lora_target_modules": ["o_proj", "q_proj"],
    }
    fewer = stage.model_copy(update={"engine_args": {"max_loras": 1, "max_lora_rank": 64}})
    made = lora_args(fewer, read_adapters(fewer, Thinker.lora_prefixes))
    assert (made["max_loras"], made["max_cpu_loras"], made["max_lora_rank"]) == (1, 2, 64)
    assert lora_args(thinker_stage(), []) == {}


def test_ranks_are_vllms() -> None:
    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_space_is_counted_for_each_layer_s_modules_of_a_name(tiny: Path, tmp_path: Path) -> None:
    stage = adapted(write_adapter(tmp_path / "adapter", tiny, projections=("q_proj", "down_proj")))
    layers = len(
        {
            name.split(".")[3]
            for name in load_file(tiny / "model.safetensors")
            if name.startswith("thinker.model.layers.")
        }
    )
    of_layer = (128 + 128) + (256 + 128)
    assert adapter_elements(stage, Thinker.lora_prefixes, tiny) == layers * of_layer * 8
    larger = stage.model_copy(update={"engine_args": {"max_lora_rank": 64, "max_loras": 3}})
    assert adapter_elements(larger, Thinker.lora_prefixes, tiny) == layers * of_layer * 64 * 3
    assert adapter_elements(thinker_stage(), Thinker.lora_prefixes, tiny) == 0


def test_the_plan_of_a_card_counts_them_among_the_weights(tiny: Path, tmp_path: Path) -> None:
    on_card = thinker_stage().model_copy(update={"num_gpus": 1})
    stage = on_card.model_copy(update={"lora_adapters": {"a": str(write_adapter(tmp_path / "adapter", tiny))}})
    without, adapted = (needs_of(bind(pipeline_config(each)), 80 * GIB)[0].fixed for each in (on_card, stage))
    in_float32 = 4 * adapter_elements(stage, Thinker.lora_prefixes, tiny)
    assert adapted.weights - without.weights == in_float32 > 0


# ------------------------------------------------------------ the configuration


def config_with(folder: Path, **adapters: str) -> str:
    old = "    advanced:\n"  # of the thinker, the first stage
    text = TINY_CONFIG.read_text()
    assert old in text
    path = folder / "changed.yaml"
    path.write_text(text.replace(old, f"{old}      lora_adapters: {json.dumps(adapters)}\n", 1))
    return str(path)


def test_check_shows_adapters(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny, rank=4)
    assert main(["check", config_with(tmp_path, support=str(folder))]) == 0
    assert capsys.readouterr().out.endswith(f"LoRA adapter support: rank 4, {folder}\n")


def test_check_refuses_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config_with(tmp_path, support=str(tmp_path / "none"))]) == BAD_INPUT
    assert "advanced.lora_adapters.support is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "wanted"),
    [
        ({"preset:tiny": "/a"}, "'preset:tiny' is taken, each model has a name of its own, use another one"),
        ({"support": "here"}, "each host must find it, so write it from / or ~/"),
        ({" ": "/a"}, "lora_adapters"),
    ],
)
def test_names_and_folders_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapters: dict[str, str], wanted: str
) -> None:
    assert main(["check", config_with(tmp_path, **adapters)]) == BAD_INPUT
    said = capsys.readouterr().err
    assert wanted in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(("name", "value"), [("max_lora_rank", 9), ("max_lora_rank", True), ("max_loras", 0)])
def test_sizes_that_vllm_has_not_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"engine_args\.{name}"):
        StageConfig.model_validate(
            {"stage_id": 0, "model_stage": "thinker", "num_gpus": 0, "engine_args": {name: value}}
        )


def test_models_are_the_checkpoint_and_all_adapters() -> None:
    config: PipelineConfig = pipeline_config(
        thinker_stage().model_copy(update={"lora_adapters": {"b": "/b", "a": "/a"}})
    )
    assert config.models == ["preset:tiny", "b", "a"]
