from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from omni_cluster.models.checkpoint_maker import CheckpointSummary, count_by_part
from omni_cluster.models.qwen2_5_omni import checkpoint as checkpoint_module
from omni_cluster.models.qwen2_5_omni.checkpoint import (
    RECIPE_VERSION,
    _weights,
    embedded_checkpoint,
    make_checkpoint,
    shipped,
)
from omni_cluster.models.qwen2_5_omni.checkpoint_configs import build_config
from omni_cluster.models.qwen2_5_omni.checkpoint_tokens import build_tokenizer, token_layout
from omni_cluster.types.errors import ConfigError

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSummary:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("sharded") / "checkpoint", max_shard_bytes=5_000_000).path


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def _loading_problems(folder: Path) -> dict[str, object]:
    # The model's own from_pretrained cannot return the loading info, because it reads the voices from the result.
    load = PreTrainedModel.from_pretrained.__func__
    _, info = load(Qwen2_5OmniForConditionalGeneration, folder, output_loading_info=True)
    return {problem: info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def test_layout_is_the_hubs(made: CheckpointSummary) -> None:
    assert {file.name for file in made.path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "processor_config.json", "spk_dict.pt",
    }  # fmt: skip
    assert json.loads((made.path / "config.json").read_text())["architectures"] == ["Qwen2_5OmniModel"]


def test_summary_counts_what_was_written(made: CheckpointSummary) -> None:
    weights = load_file(made.path / "model.safetensors")
    talker = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("talker."))
    assert made.parts["talker"] == talker
    assert made.parameters == sum(tensor.numel() for tensor in weights.values())
    assert made.size_bytes == sum(file.stat().st_size for file in made.path.iterdir())


def test_two_makings_are_identical(made: CheckpointSummary, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "again")
    assert _digests(tmp_path / "again") == _digests(made.path)


def test_nothing_but_the_checkpoint_is_left_behind(made: CheckpointSummary) -> None:
    assert [file.name for file in made.path.parent.iterdir()] == ["checkpoint"]


def test_loads_without_missing_or_unexpected_keys(made: CheckpointSummary) -> None:
    assert not any(_loading_problems(made.path).values())


def test_loads_with_its_voices(made: CheckpointSummary) -> None:
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(made.path)
    assert set(model.speaker_map) == {"Chelsie", "Ethan"}


def test_keys_and_weights_are_those_of_save_pretrained(made: CheckpointSummary, tmp_path: Path) -> None:
    Qwen2_5OmniForConditionalGeneration.from_pretrained(made.path).save_pretrained(tmp_path)
    ours, theirs = load_file(made.path / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "name",
    [
        "thinker.model.layers.0.self_attn.q_proj.weight",
        "thinker.lm_head.weight",
        "thinker.audio_tower.layers.0.fc1.weight",
        "thinker.visual.blocks.0.attn.q.weight",
        "talker.model.layers.0.mlp.up_proj.weight",
        "talker.codec_head.weight",
        "talker.thinker_to_talker_proj.weight",
    ],
)
def test_weights_carry_the_hubs_names(made: CheckpointSummary, name: str) -> None:
    assert name in load_file(made.path / "model.safetensors")


def test_shards_hold_the_same_weights_as_one_file(made: CheckpointSummary, sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    whole = load_file(made.path / "model.safetensors")
    for shard in shards:
        for name, tensor in load_file(shard).items():
            assert index["weight_map"][name] == shard.name
            assert torch.equal(tensor, whole.pop(name))
    assert len(shards) > 1 and not whole
    assert index["metadata"]["total_size"] == 4 * made.parameters
    assert all(shard.stat().st_size < 5_200_000 for shard in shards)


def test_sharded_checkpoint_loads(sharded: Path) -> None:
    assert not any(_loading_problems(sharded).values())


def test_voices_have_the_hubs_shapes(made: CheckpointSummary) -> None:
    voices = torch.load(made.path / "spk_dict.pt", weights_only=True)
    assert {name: voice["bos_token"] for name, voice in voices.items()} == {"Chelsie": 490, "Ethan": 491}
    for voice in voices.values():
        assert voice["cond"].shape == (1, 192)
        assert voice["ref_mel"].shape[0] == 1 and voice["ref_mel"].shape[2] == 80
    assert not torch.equal(voices["Chelsie"]["cond"], voices["Ethan"]["cond"])


def test_ids_that_no_tokenizer_or_codec_has_are_never_greedy(made: CheckpointSummary) -> None:
    weights = load_file(made.path / "model.safetensors")
    tokens = token_layout("tiny")
    alive = weights["thinker.lm_head.weight"].abs().sum(1).nonzero().flatten().tolist()
    assert alive == [*range(tokens.base), tokens.id_of("<|im_end|>")]
    assert weights["talker.codec_head.weight"].abs().sum(1).nonzero().flatten().tolist() == [*range(8192)]


@pytest.mark.parametrize(
    ("preset", "thinker", "talker", "token2wav"),
    [("7b", 8.93, 1.35, 0.449), ("3b", 4.70, 0.385, 0.449)],
)
def test_parameter_counts(preset: str, thinker: float, talker: float, token2wav: float) -> None:
    counts = count_by_part(_weights(preset))
    assert counts["thinker"] / 1e9 == pytest.approx(thinker, abs=0.005)
    assert counts["talker"] / 1e9 == pytest.approx(talker, abs=0.005)
    assert counts["token2wav"] / 1e9 == pytest.approx(token2wav, abs=0.0005)


@pytest.mark.parametrize("preset", ["3b", "7b"])
def test_large_presets_have_the_hubs_ids(preset: str) -> None:
    config = build_config(preset)
    thinker, talker = config.thinker_config, config.talker_config
    assert (thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index) == (151646, 151655, 151656)
    assert (thinker.bos_token_id, thinker.eos_token_id, thinker.pad_token_id) == (151644, 151645, 151643)
    assert (talker.tts_text_pad_token_id, talker.tts_text_start_token_id, talker.tts_text_end_token_id) == (
        151859, 151860, 151861,
    )  # fmt: skip
    assert (talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id) == (8292, 8293)
    assert (talker.tts_codec_end_token_id, talker.tts_codec_mask_token_id) == (8294, 8296)
    assert token_layout(preset).voices == {"Chelsie": 151872, "Ethan": 151870}
    assert talker.embedding_size == thinker.text_config.hidden_size
    assert sum(talker.rope_parameters["mrope_section"]) * 2 == talker.head_dim


def test_large_tokenizer_has_the_hubs_ids_and_round_trips_any_text() -> None:
    tokenizer = build_tokenizer("7b")
    text = "<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>Grüße, 你好 🎧<|im_end|>\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == 151644 and {151646, 151647, 151648, 151645} <= set(ids)
    assert tokenizer.decode(ids) == text
    assert all(index < 256 or index >= 151643 for index in ids)
    assert tokenizer.convert_ids_to_tokens([151643, 151652, 151656, 151664]) == [
        "<|endoftext|>", "<|vision_bos|>", "<|VIDEO|>", "<|file_sep|>",
    ]  # fmt: skip


def test_every_text_id_of_the_large_tokenizer_decodes() -> None:
    tokenizer = build_tokenizer("7b")
    assert all(piece is not None for piece in tokenizer.convert_ids_to_tokens(range(151665)))
    assert tokenizer.decode([300, 151642]) == " w300 w151642"


def test_large_tokenizer_survives_saving(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("3b")
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    text = "Hello<|im_end|>"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert (again.image_token, again.audio_token, again.video_token) == ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>")


@pytest.mark.parametrize(
    ("part", "rendered"),
    [
        ({"type": "text", "text": "Hi"}, "Hi"),
        ({"type": "image", "image": "a.png"}, "<|vision_bos|><|IMAGE|><|vision_eos|>"),
        ({"type": "audio", "audio": "a.wav"}, "<|audio_bos|><|AUDIO|><|audio_eos|>"),
        ({"type": "video", "video": "a.mp4"}, "<|vision_bos|><|VIDEO|><|vision_eos|>"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "<|vision_bos|><|IMAGE|><|vision_eos|>"),
        ({"type": "input_audio", "input_audio": {}}, "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    ],
)
def test_chat_template_renders_each_kind_of_part(made: CheckpointSummary, part: dict[str, str], rendered: str) -> None:
    processor = Qwen2_5OmniProcessor.from_pretrained(made.path)
    messages = [{"role": "user", "content": [part]}]
    text = processor.tokenizer.apply_chat_template(
        messages, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    assert text == f"{SYSTEM}<|im_start|>user\n{rendered}<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_keeps_a_given_system_prompt(made: CheckpointSummary) -> None:
    processor = Qwen2_5OmniProcessor.from_pretrained(made.path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_unknown_preset_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'13b'.*tiny, 3b, 7b"):
        make_checkpoint("13b", tmp_path / "out")
    with pytest.raises(ConfigError, match="'13b'"):
        embedded_checkpoint("13b", tmp_path)


def test_the_trained_checkpoint_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^preset is 'toy', .*: copy \S+/toy, or use one of tiny, 3b, 7b$"):
        make_checkpoint("toy", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shipped_checkpoint_is_used_where_it_is(made: CheckpointSummary) -> None:
    assert shipped(made.path) == made.path


def test_a_shipped_checkpoint_without_its_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    with pytest.raises(ConfigError, match=r"^model is preset:toy, but \S+/toy has no weights: install the package"):
        shipped(tmp_path / "toy")


def test_folder_that_holds_something_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_checkpoint("tiny", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert make_checkpoint("tiny", out).path == out
    assert (out / "config.json").is_file()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta"])
def test_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{device}'"):
        make_checkpoint("tiny", tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


def test_parent_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        make_checkpoint("tiny", tmp_path / "file" / "out")


def test_failed_making_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    def stop(message: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("tiny", tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_embedded_checkpoint_is_made_once_by_two_processes(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint; input('ready\\n');"
        "path = embedded_checkpoint('tiny', Path(sys.argv[1]));"
        "print(path, (path / 'model.safetensors').stat().st_ino)"
    )
    root = Path(checkpoint_module.__file__).parents[3]
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == "ready\n"
        print(file=other.stdin, flush=True)
        path = embedded_checkpoint("tiny", tmp_path)
        answer, _ = other.communicate()
    assert (other.returncode, answer) == (0, f"{path} {(path / 'model.safetensors').stat().st_ino}\n")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"qwen2_5_omni-tiny-{RECIPE_VERSION}"]


def test_embedded_checkpoint_lies_in_the_platform_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = embedded_checkpoint()
    assert path.parent == tmp_path / "omni_cluster"
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert embedded_checkpoint() == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
