"""What is written of the flow and the vocoder serves: this project's code2wav makes transformers' sound of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniConfig

from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.voices import VOICE_FILE, load_voices
from omni_cluster.models.sound import SoundJob
from tests.training.sayings import sayings_of, voice
from training import code2wav
from training.average import Average
from training.code2wav import averaged, flowed, load
from training.code2wav_parts import (
    DIT_PREFIX,
    TOKEN2WAV,
    VOCODER_PREFIX,
    WEIGHTS_FILE,
    new_dit,
    new_vocoder,
    weights,
    write,
)
from training.run import Plan, Run
from training.saying import SAMPLES_A_CODE
from training.vocoder import sound_of

CODES = [1, 1, 7, 7, 7, 300, 511, 42, 42, 42, 9, 10, 11, 12, 300, 300, 1, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's files of code2wav, their weights drawn: new ones have gates that are shut."""
    torch.manual_seed(0)
    path, parts = tmp_path_factory.mktemp("token2wav"), (new_dit(), new_vocoder())
    for parameter in parts[0].parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, parameter[0].numel() ** -0.5)
    write(path, *parts, {"Chelsie": voice(0), "Ethan": voice(1)})
    Qwen2_5OmniConfig(token2wav_config=TOKEN2WAV).save_pretrained(path)
    (path / WEIGHTS_FILE).rename(path / "model.safetensors")
    entries = torch.load(path / VOICE_FILE, weights_only=True)
    torch.save({name: {**entry, "bos_token": 1} for name, entry in entries.items()}, path / VOICE_FILE)
    (path / WEIGHTS_FILE).symlink_to(path / "model.safetensors")
    return path


def test_it_weighs_less_than_four_megabytes(folder: Path) -> None:
    assert 3e6 < (folder / WEIGHTS_FILE).stat().st_size < 4e6


@pytest.mark.parametrize("speaker", ["Chelsie", "Ethan"])
def test_sound_is_transformers(folder: Path, speaker: str) -> None:
    model = Code2WavModel(folder, load_voices(folder), torch.device("cpu"))
    samples = range(len(CODES) * SAMPLES_A_CODE)
    model.begin(0, SoundJob(np.array(CODES)[:, None], samples, 2 * len(CODES), speaker, 3))
    for _ in range(model.steps):
        model.step([0])
    (made,) = model.finish([0])
    dit, vocoder = load(folder)
    entry = torch.load(folder / VOICE_FILE, weights_only=True)[speaker]
    torch.manual_seed(3)
    with torch.inference_mode():
        wanted = sound_of(vocoder, flowed(dit, CODES, entry)[None])[0].clamp(-1, 1).numpy()
    assert made.shape == wanted.shape and float(np.abs(wanted).max()) > 1e-3
    np.testing.assert_allclose(made, wanted, atol=1e-4, rtol=0)


def test_the_flow_of_a_folder_is_kept_beside_a_new_vocoder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = new_vocoder()
    kept = {"average": Average(trained)}
    assert list(Run("vocoder", Plan(out=tmp_path, minutes=1, at_most=0), kept).steps()) == []
    sayings_of(1).save(tmp_path)
    (tmp_path / "codebook.pt").write_bytes(b"kept")
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["code2wav", f"--data={tmp_path}", f"--flow={folder}", f"--out={out}"])
    code2wav.main()
    torch.testing.assert_close(weights(out, DIT_PREFIX), weights(folder, DIT_PREFIX), rtol=0, atol=0)
    wanted = {name: tensor.half().float() for name, tensor in trained.state_dict().items()}
    torch.testing.assert_close(weights(out, VOCODER_PREFIX), wanted, rtol=0, atol=0)
    assert (out / "codebook.pt").read_bytes() == b"kept"


def test_averaged_weights_are_those_of_a_trainings_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    average = Average(model)
    assert list(Run("flow", Plan(out=tmp_path, minutes=1, at_most=0), {"average": average}).steps()) == []
    other = torch.nn.Linear(3, 2)
    averaged(tmp_path, "flow", other)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
