from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

from omni_cluster.models.checkpoint_maker import CheckpointSummary
from omni_cluster.models.qwen3_omni import checkpoint as checkpoint_module
from omni_cluster.models.qwen3_omni.checkpoint import RECIPE_VERSION, embedded_checkpoint, make_checkpoint
from omni_cluster.models.qwen3_omni.checkpoint_tokens import VOCAB_SIZE, build_tokenizer
from omni_cluster.types.errors import ConfigError

SPECIALS = {"pad": 356, "bos": 357, "eos": 358, "nothink": 363, "think_bos": 364, "think_eos": 365}


@pytest.fixture(scope="module")
def processor(qwen3_folder: Path) -> Any:
    return Qwen3OmniMoeProcessor.from_pretrained(qwen3_folder)


@pytest.fixture(scope="module")
def config(qwen3_folder: Path) -> Any:
    return json.loads((qwen3_folder / "config.json").read_text())


@pytest.fixture(scope="module")
def weights(qwen3_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(qwen3_folder / "model.safetensors")


def test_summary_counts_what_was_written(qwen3_tiny: CheckpointSummary, weights: dict[str, torch.Tensor]) -> None:
    assert set(qwen3_tiny.parts) == {"thinker", "talker", "code2wav"}
    assert qwen3_tiny.parameters == sum(tensor.numel() for tensor in weights.values())
    assert qwen3_tiny.size_bytes == sum(file.stat().st_size for file in qwen3_tiny.path.iterdir())


def test_two_makings_are_identical_and_another_seed_is_another_model(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests(folder: Path) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    make_checkpoint("tiny", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(qwen3_folder)
    monkeypatch.setattr(checkpoint_module, "SEED", checkpoint_module.SEED + 1)
    make_checkpoint("tiny", tmp_path / "other")
    ours, theirs = digests(qwen3_folder), digests(tmp_path / "other")
    assert [name for name in ours if ours[name] != theirs[name]] == ["model.safetensors"]


def test_loads_without_missing_or_unexpected_keys(qwen3_folder: Path) -> None:
    _, info = PreTrainedModel.from_pretrained.__func__(
        Qwen3OmniMoeForConditionalGeneration, qwen3_folder, output_loading_info=True
    )
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_keys_and_weights_are_those_of_save_pretrained(
    qwen3_reference: Any, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    qwen3_reference.save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("thinker.model.layers.0.mlp.experts.3.gate_proj.weight", (32, 64)),
        ("thinker.model.layers.5.mlp.experts.0.down_proj.weight", (64, 32)),
        ("thinker.visual.merger_list.2.mlp.0.weight", (256, 256)),
        ("talker.model.layers.2.mlp.experts.1.up_proj.weight", (16, 32)),
        ("talker.model.layers.0.mlp.shared_expert_gate.weight", (1, 32)),
        ("talker.code_predictor.model.codec_embedding.2.weight", (256, 32)),
        ("code2wav.code_embedding.weight", (1024, 32)),
    ],
)
def test_weights_carry_the_hubs_names(weights: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    assert tuple(weights[name].shape) == shape


def test_the_file_says_what_is_read_but_not_declared(config: Any) -> None:
    thinker, talker = config["thinker_config"], config["talker_config"]
    assert talker["spatial_merge_size"] == thinker["vision_config"]["spatial_merge_size"] == 2
    assert talker["text_config"]["head_dim"] == thinker["text_config"]["head_dim"] == 32
    assert talker["text_config"]["shared_expert_intermediate_size"] == 32
    assert thinker["text_config"]["tie_word_embeddings"] is False
    vision = thinker["vision_config"]
    assert vision["apply_vit_abs_pos_embed"] is True
    assert (vision["image_size"] // vision["patch_size"]) ** 2 == vision["num_position_embeddings"]
    assert thinker["vision_start_token_id"] == talker["vision_start_token_id"] == 409


def test_ids_of_sound_lie_as_the_hubs_do(config: Any) -> None:
    talker, code2wav = config["talker_config"], config["code2wav_config"]
    codes, codebooks = code2wav["codebook_size"], code2wav["num_quantizers"]
    assert talker["text_config"]["vocab_size"] == codes + 1024
    assert talker["num_code_groups"] == talker["code_predictor_config"]["num_code_groups"] == codebooks
    names = {"eos": "codec_eos_token_id"}
    assert {name: talker[names.get(name, f"codec_{name}_id")] for name in SPECIALS} == SPECIALS
    assert talker["speaker_id"] == {"chelsie": 509, "ethan": 510, "aiden": 511}
    assert talker["accept_hidden_layer"] > len(config["thinker_config"]["vision_config"]["deepstack_visual_indexes"])


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_role_is_one_token_and_so_is_the_line_break(processor: Any, config: Any, role: str) -> None:
    ids = processor.tokenizer(f"<|im_start|>{role}\nHello<|im_end|>\n").input_ids
    assert ids[:2] == [config["im_start_token_id"], config[f"{role}_token_id"]]
    assert processor.tokenizer.convert_ids_to_tokens([ids[2], ids[-1]]) == ["Ċ", "Ċ"]


def test_ids_that_no_tokenizer_or_codec_has_are_never_greedy(weights: dict[str, torch.Tensor], config: Any) -> None:
    def alive(name: str) -> list[int]:
        return [int(index) for index in weights[name].abs().sum(1).nonzero().flatten()]

    assert alive("thinker.lm_head.weight") == [*range(400), config["im_end_token_id"]]
    assert alive("talker.codec_head.weight") == [*range(256)]


# ------------------------------------------------------------ nothing is dead


def wave_of(model: Any, codes: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return model.code2wav(torch.tensor(codes).T[None])[0, 0]


def some_codes(count: int) -> list[list[int]]:
    return np.random.RandomState(3).randint(0, 256, (count, 4)).tolist()


@contextmanager
def shifted(tensor: torch.Tensor) -> Iterator[None]:
    before = tensor.clone()
    tensor += 0.1
    yield
    tensor.copy_(before)


def test_every_scale_and_bend_of_code2wav_is_in_the_sound(qwen3_reference: Any) -> None:
    codes = some_codes(3)
    wave = wave_of(qwen3_reference, codes)
    kinds = (".scale", ".gamma", ".alpha", ".beta")
    drawn = {name: p.data for name, p in qwen3_reference.code2wav.named_parameters() if name.endswith(kinds)}
    assert len(drawn) == 64
    for name, tensor in drawn.items():
        with shifted(tensor):
            changed = (wave_of(qwen3_reference, codes) - wave).abs().max()
        assert changed > 3e-4, name


def test_no_wave_is_cut_off(qwen3_reference: Any) -> None:
    wave = wave_of(qwen3_reference, some_codes(200))
    assert 0.2 < wave.abs().max() < 0.9


def replies(model: Any, processor: Any, marks: str = "", speaker: str = "ethan", **media: Any) -> tuple[list[int], Any]:
    """Text and sound of a question about the media."""
    text = f"<|im_start|>user\n{marks}What is it?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=text, return_tensors="pt", **media)
    ids, wave = model.generate(
        **inputs, speaker=speaker, thinker_max_new_tokens=8, talker_max_new_tokens=6, thinker_do_sample=False,
        talker_do_sample=False,
    )  # fmt: skip
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), wave.flatten()


def test_replies_follow_the_media_and_their_sound_the_voice(qwen3_reference: Any, processor: Any) -> None:
    model = qwen3_reference
    plain, said = replies(model, processor)
    assert len(said) == 1920 * 5 - 555
    assert not torch.equal(said, replies(model, processor, speaker="aiden")[1])
    noise = np.random.RandomState(0).uniform(-0.3, 0.3, 16_000).astype(np.float32)
    heard, said_of_it = replies(model, processor, "<|audio_start|><|audio_pad|><|audio_end|>", audio=noise)
    assert heard != plain and not torch.equal(said_of_it, said)
    picture = Image.fromarray(np.random.RandomState(1).randint(0, 255, (32, 48, 3)).astype(np.uint8))
    seen, said_of_it = replies(model, processor, "<|vision_start|><|image_pad|><|vision_end|>", images=picture)
    assert seen != plain and not torch.equal(said_of_it, said)
    assert min(len(set(ids)) for ids in (plain, heard, seen)) > 2


# ------------------------------------------------------------ the folder


@pytest.mark.parametrize(
    ("part", "rendered"),
    [
        ({"type": "text", "text": "Hi"}, "Hi"),
        ({"type": "image", "image": "a.png"}, "<|vision_start|><|image_pad|><|vision_end|>"),
        ({"type": "input_audio", "input_audio": {}}, "<|audio_start|><|audio_pad|><|audio_end|>"),
        ({"type": "video", "video": "a.mp4"}, "<|vision_start|><|video_pad|><|vision_end|>"),
    ],
)
def test_chat_template_renders_each_kind_of_part(processor: Any, part: dict[str, Any], rendered: str) -> None:
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [part]}],
        chat_template=processor.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == f"<|im_start|>user\n{rendered}<|im_end|>\n<|im_start|>assistant\n"


def test_bad_input_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^preset is '13b': use one of tiny, 30b$"):
        make_checkpoint("13b", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^preset is '13b': use one of tiny$"):
        embedded_checkpoint("13b", tmp_path)
    with pytest.raises(ConfigError, match=r"^device is 'tpu', which this host does not have: "):
        make_checkpoint("tiny", tmp_path / "out", device="tpu")
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        make_checkpoint("tiny", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_every_id_of_a_large_vocabulary_is_text() -> None:
    small, large = build_tokenizer(VOCAB_SIZE), build_tokenizer(152_064)
    text = "<|im_start|>user\nHello world, what is it?<|im_end|>"
    assert large.encode(text) == small.encode(text)
    assert large.decode([VOCAB_SIZE, 152_063]) == f" w{VOCAB_SIZE} w152063"


def test_embedded_checkpoint_is_made_once(tmp_path: Path) -> None:
    path = embedded_checkpoint("tiny", tmp_path)
    assert path.name == f"qwen3_omni-tiny-{RECIPE_VERSION}"
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert embedded_checkpoint("tiny", tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
