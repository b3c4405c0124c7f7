"""The vocoder is transformers' own, and learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_cluster.types.errors import ConfigError
from tests.training.sayings import sayings_of, seconds_are_steps
from training import vocoder
from training.code2wav_parts import new_dit, new_vocoder, write
from training.discriminators import Discriminators, adversarial_loss, discriminator_loss, spectral_loss
from training.mel import HOP, log_mel
from training.vocoder import VocoderPlan
from training.wave_data import Sayings


def sounds(sayings: Sayings) -> torch.Tensor:
    return torch.stack([torch.from_numpy(sound).float() / 2**15 for sound in sayings.sounds[0]])


@torch.inference_mode()
def test_a_sound_is_what_transformers_makes() -> None:
    made_by, mel = new_vocoder().eval(), log_mel(sounds(sayings_of(1, codes=4)))
    made = vocoder.sound_of(made_by, mel)
    assert made.shape == (1, 8 * HOP) and float(made.abs().max()) > 1e-3
    torch.testing.assert_close(made[0].clamp(-1, 1), made_by(mel.transpose(1, 2)).reshape(-1))


@pytest.mark.full  # Triton interprets slowly
def test_the_kernels_of_a_card_make_the_same_sound_and_gradients() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.training.interpreted_snake"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differences = [float(each) for each in done.stdout.split()]
    assert len(differences) == 1 + len([*new_vocoder().parameters()]) and max(differences) < 2e-3


def test_a_few_steps_make_the_sound_more_like_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sayings = sayings_of(1, codes=16)
    with seconds_are_steps(monkeypatch):
        vocoder.train(VocoderPlan(out=tmp_path, minutes=12 / 60, batch=1, frames=12, adversarial_from=1.1), sayings)
    real, losses = sounds(sayings), []
    torch.manual_seed(0)
    model = new_vocoder()
    with torch.inference_mode():
        for weights in (model.state_dict(), torch.load(tmp_path / "vocoder.pt", weights_only=True)["parts"]["model"]):
            model.load_state_dict(weights)
            losses.append(float(spectral_loss(vocoder.sound_of(model, log_mel(real)), real)))
    assert losses[1] < 0.9 * losses[0]


def test_a_training_begins_with_the_weights_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, begun, sayings = new_vocoder(), tmp_path / "begun", sayings_of(1, codes=16)
    write(tmp_path, new_dit(), earlier, {})

    def run(at_most: float) -> dict[str, Any]:
        plan = VocoderPlan(out=begun, minutes=1, at_most=at_most, batch=1, frames=8, adversarial_from=0, init=tmp_path)
        with seconds_are_steps(monkeypatch):
            vocoder.train(plan, sayings)
        state: dict[str, Any] = torch.load(begun / "vocoder.pt", weights_only=True)
        return state

    wanted = {name: tensor.half().float() for name, tensor in earlier.state_dict().items()}
    torch.testing.assert_close(run(at_most=0)["parts"]["model"], wanted, rtol=0, atol=0)
    assert run(at_most=4 / 60)["step"] == 2  # of two optimizers each
    said = (begun / "vocoder.log").read_text()
    assert "adversarial" in said and "discriminators" in said


def test_a_folder_without_a_vocoder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    plan = VocoderPlan(out=tmp_path, minutes=1, init=tmp_path)
    with pytest.raises(ConfigError) as raised:
        vocoder.train(plan, sayings_of(1, codes=16))
    assert str(raised.value) == f"{tmp_path} has no token2wav.safetensors: give the folder of a trained code2wav."


def test_judges_learn_to_tell_a_made_sound_from_a_real_one() -> None:
    torch.manual_seed(0)
    real, discriminators = sounds(sayings_of(2, codes=6)), Discriminators()
    made = 0.1 * torch.randn_like(real)
    learning, told = torch.optim.Adam(discriminators.parameters(), 1e-3), []
    for _ in range(12):
        told.append(discriminator_loss(discriminators(real), discriminators(made)))
        learning.zero_grad()
        told[-1].backward()
        learning.step()
    assert told[-1].item() < 0.7 * told[0].item()
    with torch.inference_mode():
        of_real = discriminators(real)
        assert float(adversarial_loss(of_real, of_real)) < float(adversarial_loss(of_real, discriminators(made)))
