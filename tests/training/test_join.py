"""The toy's parts, joined to a checkpoint that this project serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniForConditionalGeneration

from omni_cluster.config.loader import load_config
from omni_cluster.engine.omni_llm import OmniLLM
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ConfigError
from training.checkpoint import TOKENS, toy_config
from training.code2wav_parts import new_dit, new_vocoder, write
from training.codes import SIZE
from training.join import PARTS, WEIGHTS, join

MOST_BYTES = 20_000_000
MOST_CODES = 40


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory) -> dict[str, Path]:
    """The folders of parts that have learnt nothing."""
    folders = {part: tmp_path_factory.mktemp(part) for part in PARTS}
    folders["thinker"] = toy_folder
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(toy_config())
    for head in (model.thinker.lm_head, model.talker.codec_head):
        torch.nn.init.normal_(head.weight, std=0.3)
    for part in ("thinker", "talker"):
        weights = {f"{part}.{name}": each.half() for name, each in getattr(model, part).state_dict().items()}
        save_file(weights, folders[part] / WEIGHTS[part])
    voices = {name: {"cond": torch.randn(1, 192), "ref_mel": torch.randn(1, 100, 80) - 4} for name in TOKENS.voices}
    write(folders["code2wav"], new_dit(), new_vocoder(), voices)
    return folders


@pytest.fixture(scope="module")
def toy(parts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("joined") / "toy"
    options = [word for part, folder in parts.items() for word in (f"--{part}", str(folder))]
    subprocess.run([sys.executable, "-m", "training.join", *options, "--out", str(out)], check=True)
    return out


def test_it_has_all_weights_that_transformers_looks_for(toy):
    with torch.device("meta"):
        wanted = Qwen2_5OmniForConditionalGeneration(toy_config()).state_dict()
    weights = {name: each for part in PARTS for name, each in load_file(toy / WEIGHTS[part]).items()}
    assert {name: each.shape for name, each in weights.items()} == {name: each.shape for name, each in wanted.items()}
    assert {each.dtype for each in weights.values()} == {torch.float16}


def test_it_is_small(toy):
    assert 15_000_000 < sum(file.stat().st_size for file in toy.iterdir()) < MOST_BYTES


def test_its_ids_and_voices_fit_each_other(toy):
    ids = Qwen2_5Omni(toy).ids
    assert ids.num_codes == SIZE
    assert {name: voice.bos_token for name, voice in load_voices(toy).items()} == TOKENS.voices
    assert Qwen2_5Omni(toy).voices == ("Chelsie", "Ethan")


def test_a_file_that_is_missing_is_named(parts, tmp_path):
    with pytest.raises(ConfigError, match=r"has no talker\.safetensors: give the folder of a trained talker"):
        join({**parts, "talker": tmp_path}, tmp_path / "toy")
    assert not (tmp_path / "toy").exists()


@pytest.mark.full
def test_text_and_sound_come_out_of_it(toy):
    config = load_config("stage_configs/qwen2_5_omni_toy.yaml", known_families=known_families())
    talker = config.stages[1].default_sampling_params | {"max_tokens": MOST_CODES}
    stages = [
        config.stages[0],
        config.stages[1].model_copy(update={"default_sampling_params": talker}),
        config.stages[2],
    ]
    with OmniLLM(config.model_copy(update={"model": str(toy), "stages": stages})) as omni:
        asked = omni.render([{"role": "user", "content": "What is three plus four?"}])
        outputs = omni.generate([asked, asked], voice=["Chelsie", "Ethan"], use_tqdm=False)
    for output in outputs:
        assert len(output.token_ids) > 1
        assert output.audio is not None
        assert len(output.audio.samples) % 480 == 0
        assert np.isfinite(output.audio.samples).all()
        assert 0 < len(output.audio.samples) <= MOST_CODES * 480
