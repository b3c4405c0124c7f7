"""The parts of every engine's memory, against what is really loaded, and what starts with them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel
from vllm.config import CacheConfig, SchedulerConfig

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine import fitting
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.fitting import fit_cards, fit_process, fit_replica, memory_plan, needs_of
from omni_cluster.memory import needs, sizes
from omni_cluster.memory.devices import CARD_RESERVE_BYTES, CardMemory
from omni_cluster.memory.needs import CUDA_CONTEXT_BYTES, NCCL_BYTES, ar_parts, cache_bytes_per_token, sequence_bytes
from omni_cluster.memory.sizes import GIB, ARSizes, SoundSizes, StageSizes, WeightGroup, weight_bytes
from omni_cluster.models.checkpoint_files import load_tensors
from omni_cluster.models.checkpoint_maker import count_by_part
from omni_cluster.models.qwen2_5_omni import memory
from omni_cluster.models.qwen2_5_omni.checkpoint import _weights
from omni_cluster.models.qwen2_5_omni.checkpoint_configs import build_config
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.memory import dit_frame_bytes, vocoder_frame_bytes
from omni_cluster.types.errors import ConfigError
from omni_cluster.vllm_engine.card_memory import measure_cards
from tests.live_bytes import LiveBytes
from tests.pages import Block, blocks_of

CARD = CardMemory(80 * GIB, 80 * GIB)


@pytest.fixture(scope="module", autouse=True)
def _each_file_is_read_once() -> Iterator[None]:
    """No checkpoint changes here, and most of the time would go to reading what 7B's file and configuration say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_config", functools.cache(memory._config))
        patch.setattr(sizes, "header_of", functools.cache(sizes.header_of))
        yield


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A 7B checkpoint of headers: the file has the size of its weights and no blocks on the disk."""
    folder = tmp_path_factory.mktemp("seven_b")
    config = build_config("7b")
    config.save_pretrained(folder)
    shutil.copy(tiny / "spk_dict.pt", folder)
    with torch.device("meta"):
        tensors = Qwen2_5OmniForConditionalGeneration(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        wide = name.startswith("token2wav.")
        start, end = end, end + tensor.numel() * (4 if wide else 2)
        header[name] = {
            "dtype": "F32" if wide else "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def bound_to(folder: Path, name: str = "qwen2_5_omni_one_gpu", **stages: dict[str, Any]) -> BoundPipeline:
    """A shipped configuration on `folder`, with fields of its stages changed by name; None removes one."""
    config = load_config(STAGE_CONFIGS / f"{name}.yaml", known_families=("qwen2_5_omni",))
    changed = []
    for given in config.model_dump(exclude_none=True)["stages"]:
        changes = dict(stages.get(given["model_stage"], {}))
        engine_args = {**given["engine_args"], **changes.pop("engine_args", {})}
        merged = {**given, **changes, "engine_args": engine_args}
        changed.append({key: value for key, value in merged.items() if value is not None})
    fields = {**config.model_dump(exclude_none=True), "model": str(folder), "stages": changed}
    return bind(PipelineConfig.model_validate(fields))


def engine_args(bound: BoundPipeline, model_stage: str) -> dict[str, Any]:
    return next(s.engine_args for s in bound.config.stages if s.model_stage == model_stage)


def stage_sizes(folder: Path, model_stage: str) -> StageSizes:
    stage = next(stage for stage in bound_to(folder).config.stages if stage.model_stage == model_stage)
    return Qwen2_5Omni(folder).specs[model_stage].sizes(stage)


def ar_sizes(folder: Path, model_stage: str) -> ARSizes:
    sizes = stage_sizes(folder, model_stage)
    assert isinstance(sizes, ARSizes)
    return sizes


# ------------------------------------------------------------------- weights


@pytest.mark.parametrize("prefix", ["thinker.", "talker.", "token2wav."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_bytes_that_are_loaded(tiny: Path, prefix: str, dtype: torch.dtype) -> None:
    loaded = load_tensors(tiny, prefix, torch.device("cpu")).values()
    loaded_bytes = sum(tensor.to(dtype).nbytes for tensor in loaded)
    assert weight_bytes(tiny, (WeightGroup(prefix),), dtype.itemsize, 1) == loaded_bytes > 0


def test_a_pointer_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    """As Git LFS leaves it: its first eight bytes are no length that there is memory for."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no safetensors file"):
        weight_bytes(tmp_path, (WeightGroup("thinker."),), 2, 1)


def test_weights_of_7b_are_its_parameters(seven_b: Path) -> None:
    parameters = count_by_part(_weights("7b"))
    for stage, part in {"thinker": "thinker", "talker": "talker", "code2wav": "token2wav"}.items():
        sizes = stage_sizes(seven_b, stage)
        groups = sizes.groups if isinstance(sizes, SoundSizes) else sizes.weights
        assert weight_bytes(seven_b, groups, 2, 1) == 2 * parameters[part]


def test_tensor_parallelism_halves_all_but_what_is_on_each_card(seven_b: Path) -> None:
    groups = ar_sizes(seven_b, "thinker").weights
    whole, half = (weight_bytes(seven_b, groups, 2, cards) for cards in (1, 2))
    on_each = weight_bytes(seven_b, (WeightGroup("thinker.audio_tower."),), 2, 1)
    assert half == (whole - on_each) / 2 + on_each


def test_a_sharded_checkpoint_is_read_by_its_index(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "model.safetensors", tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    groups = (WeightGroup("talker."),)
    assert weight_bytes(tmp_path, groups, 4, 1) == weight_bytes(tiny, groups, 4, 1)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, so the weights cannot be counted"):
        weight_bytes(tmp_path, (WeightGroup("talker."),), 2, 1)


# -------------------------------------------------------------- KV and others


def test_a_token_of_the_7b_thinker_and_talker(seven_b: Path) -> None:
    """Layers x KV heads x head size x keys and values x bytes, by the published sizes."""
    thinker, talker, _ = bound_to(seven_b).config.stages
    assert cache_bytes_per_token(thinker, ar_sizes(seven_b, "thinker")) == 28 * 4 * 128 * 2 * 2
    assert cache_bytes_per_token(talker, ar_sizes(seven_b, "talker")) == 24 * 4 * 128 * 2 * 2


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"num_gpus": 2, "tensor_parallel_size": 2}, 2),
        ({"num_gpus": 8, "tensor_parallel_size": 8}, 4),  # four KV heads: from there on they are repeated
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, 2),
    ],
)
def test_the_cache_of_a_token_shrinks(seven_b: Path, settings: dict[str, Any], parts: int) -> None:
    sizes = ar_sizes(seven_b, "thinker")
    plain, changed = (bound_to(seven_b, thinker=s).config.stages[0] for s in ({}, settings))
    assert cache_bytes_per_token(changed, sizes) * parts == cache_bytes_per_token(plain, sizes)


def test_the_longest_sequence_has_whole_blocks_and_the_null_block(seven_b: Path) -> None:
    sizes = ar_sizes(seven_b, "thinker")
    stage = bound_to(seven_b, thinker={"engine_args": {"max_model_len": 33}}).config.stages[0]
    assert sequence_bytes(stage, sizes) == 4 * 16 * cache_bytes_per_token(stage, sizes)


def test_vllms_defaults_are_ours() -> None:
    assert needs.BLOCK_TOKENS == CacheConfig.DEFAULT_BLOCK_SIZE
    assert needs.MAX_NUM_BATCHED_TOKENS == SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert needs.MAX_NUM_SEQS == SchedulerConfig.DEFAULT_MAX_NUM_SEQS


def parts_with(folder: Path, settings: dict[str, Any]) -> Any:
    stage = bound_to(folder, thinker=settings).config.stages[0]
    return ar_parts(stage, folder, ar_sizes(folder, "thinker"))


def test_each_setting_moves_its_own_part(seven_b: Path) -> None:
    plain = parts_with(seven_b, {})
    assert parts_with(seven_b, {"engine_args": {"max_num_batched_tokens": 65536}}).activations > plain.activations
    assert parts_with(seven_b, {"engine_args": {"max_num_seqs": 1024}}).activations > plain.activations
    without_images = {"engine_args": {"limit_mm_per_prompt": {"audio": 4, "image": 0, "video": 0}}}
    assert parts_with(seven_b, without_images).activations < plain.activations
    assert parts_with(seven_b, {"engine_args": {"enforce_eager": True}}).cuda_graphs == 0 < plain.cuda_graphs
    split = parts_with(seven_b, {"num_gpus": 2, "tensor_parallel_size": 2})
    assert split.cuda_context == CUDA_CONTEXT_BYTES + NCCL_BYTES
    assert split.activations < plain.activations


def test_residual_codes_are_kept_for_each_position_of_each_request(seven_b: Path) -> None:
    stage = bound_to(seven_b, talker={"engine_args": {"max_num_seqs": 8, "max_model_len": 1000}}).config.stages[1]
    plain = ar_sizes(seven_b, "talker")
    of_16 = ar_parts(stage, seven_b, replace(plain, residual_codes=15))
    assert of_16.activations - ar_parts(stage, seven_b, plain).activations == 8 * 1000 * 15 * 2


def test_what_a_model_makes_as_it_loads_and_keeps_of_requests_is_counted(seven_b: Path) -> None:
    stage = bound_to(seven_b, talker={"engine_args": {"max_num_seqs": 8}}).config.stages[1]
    plain = ar_sizes(seven_b, "talker")
    more = ar_parts(stage, seven_b, replace(plain, made_elements=1000, request_elements=30))
    assert more.weights - ar_parts(stage, seven_b, plain).weights == 1000 * 2
    adapted = ar_parts(stage, seven_b, replace(plain, adapter_elements=700))
    assert adapted.weights - ar_parts(stage, seven_b, plain).weights == 700 * 2
    assert more.activations - ar_parts(stage, seven_b, plain).activations == 8 * 30 * 2


def test_what_a_model_keeps_of_each_position_of_a_step_is_counted(seven_b: Path) -> None:
    stage = bound_to(seven_b, thinker={"engine_args": {"max_num_batched_tokens": 512}}).config.stages[0]
    plain = ar_sizes(seven_b, "thinker")
    more = ar_parts(stage, seven_b, replace(plain, buffers_size=30))
    assert more.activations - ar_parts(stage, seven_b, plain).activations == 512 * 30 * 2


def test_the_vocoders_activations_bound_a_traced_pass() -> None:
    config, frames = build_config("7b").token2wav_config.bigvgan_config, 500
    with torch.device("meta"):
        model = Qwen2_5OmniToken2WavBigVGANModel(config).eval()
        mel = torch.empty(2, config.mel_dim, frames)
    with torch.no_grad(), LiveBytes() as counted, pytest.raises(NotImplementedError, match="copy out of meta"):
        model(mel)
    traced = counted.peak / (2 * frames)
    assert traced <= vocoder_frame_bytes(config) <= 1.25 * traced


def test_streams_and_frames_of_the_7b_sound_stage(seven_b: Path) -> None:
    bound = bound_to(
        seven_b, code2wav={"options": {}, "advanced_options": {"max_streams": 3, "max_batch_frames": 20_000}}
    )
    fixed = needs_of(bound, 80 * GIB)[2].fixed
    config = build_config("7b").token2wav_config
    # A piece makes the next state of its stream beside the last one: twice as many as there are streams.
    assert fixed.streams == 2 * 3 * 36 * 2 * 2 * 2 * 24 * 1024 * 4
    frame_bytes = dit_frame_bytes(config.dit_config) + vocoder_frame_bytes(config.bigvgan_config)
    assert fixed.activations == 20_000 * frame_bytes


def test_a_vocoder_in_float16_is_there_in_float32_too(seven_b: Path) -> None:
    float32, float16 = (
        needs_of(bound_to(seven_b, code2wav={"advanced_options": {"vocoder_dtype": dtype}}), 80 * GIB)[2].fixed
        for dtype in ("float32", "float16")
    )
    sizes = stage_sizes(seven_b, "code2wav")
    assert isinstance(sizes, SoundSizes)
    assert float16.weights - float32.weights == weight_bytes(seven_b, sizes.weights[1].groups, 2, 1) > 0


def test_float8_takes_a_byte_a_weight_more_than_bfloat16_whose_layers_small_steps_need(seven_b: Path) -> None:
    bfloat16, float8 = (
        needs_of(bound_to(seven_b, code2wav={"options": {"dtype": dtype}}), 80 * GIB)[2].fixed
        for dtype in ("bfloat16", "float8")
    )
    sizes = stage_sizes(seven_b, "code2wav")
    assert isinstance(sizes, SoundSizes)
    dit = weight_bytes(seven_b, sizes.weights[0].groups, 1, 1)
    assert float8.weights - bfloat16.weights == dit > 0
    assert float8.streams == bfloat16.streams


def test_a_batch_is_never_smaller_than_the_longest_answer(seven_b: Path) -> None:
    batches = [{"advanced_options": {"max_batch_frames": frames}} for frames in (1, 2 * 4096)]
    small, large = (needs_of(bound_to(seven_b, code2wav=each), 80 * GIB)[2].fixed.activations for each in batches)
    assert small == large


# ------------------------------------------------------------------ together


def test_one_80_gib_card_holds_all_stages_of_7b_with_64_sequences_each(seven_b: Path) -> None:
    plan = memory_plan(bound_to(seven_b), 80 * GIB)
    assert len(plan.engines) == 3
    (card,) = plan.cards
    assert plan.taken(card) < card.usable == 80 * GIB - CARD_RESERVE_BYTES
    assert plan.engines[0].kv_cache == 64 * 4096 * 28 * 4 * 128 * 2 * 2


def test_a_smaller_card_names_the_stage_that_does_not_fit(seven_b: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage 2 \(code2wav\) does not fit on the shared card of 36\.0 GiB beside"):
        memory_plan(bound_to(seven_b), 37 * GIB)


@pytest.mark.parametrize("block", blocks_of("refusal"), ids=str)
def test_the_page_has_the_sentence_of_a_card_that_is_too_small(seven_b: Path, block: Block) -> None:
    with pytest.raises(ConfigError) as refused:
        memory_plan(bound_to(seven_b), 27 * GIB)
    assert str(refused.value) == " ".join(block.text.split())


def test_replicas_on_one_card_count_each(seven_b: Path) -> None:
    one, two = (memory_plan(bound_to(seven_b, talker={"num_replicas": n, "num_gpus": 0.125}), 96 * GIB) for n in (1, 2))
    assert two.taken(two.cards[0]) == one.taken(one.cards[0]) + one.engines[1].total


def test_without_expected_tokens_a_cache_takes_what_its_card_has(seven_b: Path) -> None:
    plan = memory_plan(bound_to(seven_b, "qwen2_5_omni"), 80 * GIB)
    assert [plan.taken(card) for card in plan.cards[:2]] == [card.usable for card in plan.cards[:2]]


def test_sizes_in_the_configuration_win_and_count(seven_b: Path) -> None:
    plain = bound_to(seven_b)
    stated = bound_to(seven_b, thinker={"engine_args": {"kv_cache_memory_bytes": 3 * GIB}})
    before, after = memory_plan(plain, 80 * GIB), memory_plan(stated, 80 * GIB)
    assert after.engines[0].kv_cache == 3 * GIB
    assert after.engines[0].fixed == before.engines[0].fixed
    assert engine_args(fit_cards(stated, {0: CARD}), "thinker")["kv_cache_memory_bytes"] == 3 * GIB


def test_a_stated_share_of_a_card_is_left_to_vllm_and_counts(seven_b: Path) -> None:
    stated = bound_to(seven_b, thinker={"engine_args": {"gpu_memory_utilization": 0.5}})
    assert memory_plan(stated, 80 * GIB).engines[0].total == 40 * GIB + CUDA_CONTEXT_BYTES
    args = engine_args(fit_cards(stated, {0: CARD}), "thinker")
    assert args["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in args


def test_memory_gib_is_a_stages_exact_part(seven_b: Path) -> None:
    parts = {"thinker": {"memory_gib": 30}, "talker": {"memory_gib": 12.5}, "code2wav": {"memory_gib": 11}}
    plan = memory_plan(bound_to(seven_b, **parts), 80 * GIB)
    assert [plan.engines[i].total for i in range(3)] == [30 * GIB, 12.5 * GIB, 11 * GIB]


def exact_gib(seven_b: Path) -> float:
    """What the thinker takes at the least."""
    return needs_of(bound_to(seven_b), 80 * GIB)[0].least / GIB


def test_the_least_memory_gib_is_enough_and_one_byte_less_is_not(seven_b: Path) -> None:
    exact = exact_gib(seven_b)
    memory_plan(bound_to(seven_b, thinker={"memory_gib": exact}), 80 * GIB)
    with pytest.raises(ConfigError, match=r"one sequence of max_model_len 32768 takes 1\.8; .* at most 32752"):
        memory_plan(bound_to(seven_b, thinker={"memory_gib": exact - 1 / GIB}), 80 * GIB)


@pytest.mark.parametrize(
    ("stage", "settings", "words"),
    [
        ("talker", {"engine_args": {"kv_cache_memory_bytes": GIB}}, r"stage 1 \(talker\): .* leave 1\.0 GiB"),
        ("thinker", {"memory_gib": 5}, r"stage 0 \(thinker\): .* leave 0\.0 GiB .*; give it more memory"),
        ("thinker", {"engine_args": {"gpu_memory_utilization": 0.1}}, r"stage 0 \(thinker\)"),
        ("code2wav", {"memory_gib": 2}, r"stage 2 \(code2wav\): memory_gib is 2 and its parts take"),
    ],
)
def test_a_stage_that_cannot_hold_what_it_must_is_refused(
    seven_b: Path, stage: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        memory_plan(bound_to(seven_b, **{stage: settings}), 80 * GIB)


# ------------------------------------------------------------------ at start


def test_every_engine_of_a_process_gets_its_cache_and_what_must_be_free(seven_b: Path) -> None:
    fitted = fit_cards(bound_to(seven_b), {0: CARD})
    thinker, talker, code2wav = (engine_args(fitted, s) for s in ("thinker", "talker", "code2wav"))
    assert thinker["kv_cache_memory_bytes"] > talker["kv_cache_memory_bytes"] > 0
    assert "kv_cache_memory_bytes" not in code2wav
    shares = [args["gpu_memory_utilization"] for args in (thinker, talker, code2wav)]
    assert 0 < sum(shares) < 1
    assert thinker["max_model_len"] == 32768


def test_a_process_that_sees_other_cards_uses_the_first_of_those(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    cards = {2: CARD, 3: CardMemory(80 * GIB, 0)}
    assert engine_args(fit_cards(bound_to(seven_b), cards), "thinker")["kv_cache_memory_bytes"] > 0


def test_cards_that_are_not_here_are_named(seven_b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "measure_cards", lambda: (CARD,))
    pinned = {"gpus": [0], "num_gpus": None}
    elsewhere = {"gpus": [4], "num_gpus": None}
    with pytest.raises(ConfigError, match=r"the stages need GPUs \[0, 4\] and 1 of them are here"):
        fit_process(bound_to(seven_b, thinker=pinned, talker=pinned, code2wav=elsewhere))


def test_replicas_compute_the_same_sizes_as_one_process_on_a_card(seven_b: Path) -> None:
    bound = bound_to(seven_b)
    in_process = fit_cards(bound, {0: CARD}).config
    assert all(fit_replica(bound, stage, [CARD]).config == in_process for stage in bound.config.stages)


def test_a_process_needs_all_its_memory_free_and_a_replica_its_own(seven_b: Path) -> None:
    bound = bound_to(seven_b)
    plan = memory_plan(bound, 80 * GIB)
    whole, own = plan.taken(plan.cards[0]), plan.engines[1].total
    talker = bound.config.stages[1]
    fit_cards(bound, {0: CardMemory(80 * GIB, whole)})
    with pytest.raises(ConfigError, match=r"GPU 0 has .* of 80\.0 GiB free and .* are needed; end what else"):
        fit_cards(bound, {0: CardMemory(80 * GIB, whole - 1)})
    fit_replica(bound, talker, [CardMemory(80 * GIB, own)])
    with pytest.raises(ConfigError, match="GPU 0 of talker has"):
        fit_replica(bound, talker, [CardMemory(80 * GIB, own - 1)])


def test_stages_without_cards_are_left_as_they_are(tiny: Path) -> None:
    bound = bound_to(tiny, "qwen2_5_omni_tiny")
    assert fit_process(bound) is bound
    assert memory_plan(bound, 80 * GIB).cards == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a host without a card")
def test_a_host_without_cards_has_nothing_to_check(seven_b: Path) -> None:
    bound = bound_to(seven_b)
    assert fit_process(bound) is bound


@pytest.mark.gpu
def test_cards_are_measured() -> None:
    card, *_ = measure_cards()
    assert 0 < card.free_bytes <= card.total_bytes == torch.cuda.mem_get_info(0)[1]


def test_a_stage_may_be_given_its_part_only_once() -> None:
    fields = {"stage_id": 0, "model_stage": "s", "memory_gib": 4.0}
    StageConfig(**fields, num_gpus=1)
    with pytest.raises(ValueError, match="the stage has no card"):
        StageConfig(**fields, num_gpus=0)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes is set too"):
        StageConfig(**fields, num_gpus=1, engine_args={"kv_cache_memory_bytes": 5})
