"""The vocoder is transformers' own, and learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.sayings import sayings_of, seconds_are_steps
from training import vocoder
from training.code2wav_parts import new_vocoder
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
