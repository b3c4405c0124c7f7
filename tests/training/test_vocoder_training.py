"""The vocoder is transformers' own, and learns; a training in parts is the same as an unbroken one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.sayings import sayings_of, seconds_are_steps
from training import flow, vocoder
from training.code2wav_parts import new_vocoder
from training.judges import Judges, judged_loss, judging_loss, spectral_loss
from training.mel import HOP, log_mel
from training.resume import Average, falling
from training.wave_data import Sayings

CPU = torch.device("cpu")
Train = Callable[..., None]


def sounds(sayings: Sayings) -> torch.Tensor:
    return torch.stack([torch.from_numpy(sound).float() / 2**15 for sound in sayings.sounds[0]])


@torch.inference_mode()
def test_a_sound_is_what_transformers_makes() -> None:
    made_by, mel = new_vocoder().eval(), log_mel(sounds(sayings_of(1, codes=4)))
    made = vocoder.sound_of(made_by, mel)
    assert made.shape == (1, 8 * HOP) and float(made.abs().max()) > 1e-3
    torch.testing.assert_close(made[0].clamp(-1, 1), made_by(mel.transpose(1, 2)).reshape(-1))


def test_a_few_steps_make_the_sound_more_like_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sayings, kept = sayings_of(1, codes=16), tmp_path / "vocoder.pt"
    with seconds_are_steps(monkeypatch):
        vocoder.train(sayings, kept, 12 / 60, None, 1, CPU, frames=12, judged_from=1.1)
    real, losses = sounds(sayings), []
    torch.manual_seed(0)
    model = new_vocoder()
    with torch.inference_mode():
        for weights in (model.state_dict(), torch.load(kept, weights_only=True)["parts"]["model"]):
            model.load_state_dict(weights)
            losses.append(float(spectral_loss(vocoder.sound_of(model, log_mel(real)), real)))
    assert losses[1] < 0.9 * losses[0]


def test_judges_learn_to_tell_a_made_sound_from_a_real_one() -> None:
    torch.manual_seed(0)
    real, judges = sounds(sayings_of(2, codes=6)), Judges()
    made = 0.1 * torch.randn_like(real)
    learning, told = torch.optim.Adam(judges.parameters(), 1e-3), []
    for _ in range(12):
        told.append(judging_loss(judges(real), judges(made)))
        learning.zero_grad()
        told[-1].backward()
        learning.step()
    assert told[-1].item() < 0.7 * told[0].item()
    with torch.inference_mode():
        of_real = judges(real)
        assert float(judged_loss(of_real, of_real)) < float(judged_loss(of_real, judges(made)))


TRAININGS: dict[str, Train] = {
    "flow": partial(flow.train, batch=2, device=CPU),
    "vocoder": partial(vocoder.train, batch=1, device=CPU, frames=8, judged_from=0.5),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_in_parts_is_the_same_as_an_unbroken_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, averages and what the optimisers know, to the bit; judges come in between."""
    sayings, minutes = sayings_of(2, codes=12), 8 / 60

    def kept(parts: list[float | None], path: Path) -> Any:
        for at_most in parts:
            with seconds_are_steps(monkeypatch):
                TRAININGS[name](sayings, path, minutes, at_most)
            torch.rand(7)  # what another user of the generator does in between
        return torch.load(path, weights_only=True)

    whole = kept([None], tmp_path / "whole.pt")
    in_parts = kept([3 / 60, 2 / 60, None], tmp_path / "parts.pt")
    assert whole["step"] == in_parts["step"] > 5
    torch.testing.assert_close(in_parts["parts"], whole["parts"], rtol=0, atol=0)


def test_the_average_is_of_the_last_tenth_of_the_steps_and_of_no_more_than_asked_for() -> None:
    def lag(steps: int, taken: int) -> float:
        """By how many steps the average is behind weights that grow by one each."""
        model = torch.nn.Linear(1, 1, bias=False)
        average = Average(model, steps)
        for value in range(taken):
            torch.nn.init.constant_(model.weight, value)
            average.update()
        return taken - 1 - average.state_dict()["weight"].item()

    assert lag(steps=1000, taken=10) == 0
    assert lag(steps=1000, taken=300) == pytest.approx(300 / 11, rel=0.1)
    assert lag(steps=20, taken=300) == pytest.approx(19, rel=0.1)


def test_the_rate_rises_first_and_falls_to_a_hundredth() -> None:
    rates = [falling(progress / 1000, 1.0) for progress in range(1001)]
    top = max(range(1001), key=rates.__getitem__)
    assert 5 <= top <= 15 and rates[top] == pytest.approx(1, abs=0.02)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)
