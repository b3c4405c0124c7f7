"""A training in several runs is the same as one in one run, and a killed run loses no more than its last minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.sayings import sayings_of, seconds_are_steps
from training.flow import FlowPlan
from training.flow import train as train_flow
from training.run import SAVE_EVERY_S, Plan, Run, descend, run_options
from training.vocoder import VocoderPlan
from training.vocoder import train as train_vocoder
from training.wave_data import Sayings

SAYINGS = sayings_of(2, codes=12)
TRAININGS: dict[str, Callable[..., None]] = {
    "flow": lambda **plan: train_flow(FlowPlan(batch=2, **plan), SAYINGS),
    "vocoder": lambda **plan: train_vocoder(VocoderPlan(batch=1, frames=8, adversarial_from=0.5, **plan), SAYINGS),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_in_several_runs_is_the_same_as_in_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, averages and what the optimizers know, to the bit; discriminators come in between."""

    def kept(runs: list[float | None], out: Path) -> Any:
        for at_most in runs:
            with seconds_are_steps(monkeypatch):
                TRAININGS[name](out=out, minutes=8 / 60, at_most=at_most)
            torch.rand(7)  # what another user of the generator does in between
        return torch.load(out / f"{name}.pt", weights_only=True)

    whole = kept([None], tmp_path / "whole")
    in_runs = kept([3 / 60, 2 / 60, None, None], tmp_path / "runs")
    assert whole["step"] == in_runs["step"] > 5
    torch.testing.assert_close(in_runs["parts"], whole["parts"], rtol=0, atol=0)


class Weight:
    """One that is a step larger after each."""

    def __init__(self, out: Path, minutes: float = 10) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.run = Run("weight", Plan(out=out, minutes=minutes), {"model": self.model})

    def step(self) -> None:
        descend(self.optimizer, [-self.model.weight.sum()], rate=1.0, longest=2.0)


def test_a_run_that_ends_while_it_saves_has_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = torch.save, 0

    def save_and_half_save(state: Any, file: Path) -> None:
        nonlocal saved
        save(state, file)
        saved += 1
        if saved == 2:
            file.write_bytes(file.read_bytes()[:100])
            raise KeyboardInterrupt

    with seconds_are_steps(monkeypatch):
        monkeypatch.setattr(torch, "save", save_and_half_save)
        weight = Weight(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            for _ in weight.run.steps():
                weight.step()
    later = Weight(tmp_path)
    assert later.run.step == later.model.weight.item() == SAVE_EVERY_S
    assert later.run.progress == pytest.approx(SAVE_EVERY_S / 600, abs=0.01)
    assert "goes on at step 60, 1.0 of 10 minutes" in (tmp_path / "weight.log").read_text()


def test_the_rate_rises_first_and_falls_to_a_hundredth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    with seconds_are_steps(monkeypatch):
        weight = Weight(tmp_path, minutes=16)
        for _ in weight.run.steps():
            rates.append(weight.run.rate(1.0))
            weight.step()
    top = max(range(960), key=rates.__getitem__)
    assert len(rates) == 960 and 5 <= top <= 15 and rates[top] == pytest.approx(1, abs=0.02)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.01, rel=0.01)


def test_the_log_has_means_of_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with seconds_are_steps(monkeypatch):
        weight = Weight(tmp_path, minutes=30 / 60)
        for step in weight.run.steps():
            weight.run.tell(loss=torch.tensor(float(step)), rate=0.5)
            weight.step()
    assert (tmp_path / "weight.log").read_text().splitlines() == [
        "step 20, 0.3 of 0.5 minutes: loss 9.5, rate 0.5",
        "step 30, 0.5 of 0.5 minutes: loss 24.5, rate 0.5",
    ]


def test_a_batch_whose_gradients_are_no_numbers_is_left_out(tmp_path: Path) -> None:
    weight = Weight(tmp_path)
    descend(weight.optimizer, [weight.model.weight.sum() * torch.nan], rate=1.0, longest=1.0)
    assert weight.model.weight.item() == 0
    descend(weight.optimizer, [-3 * weight.model.weight.sum(), -2 * weight.model.weight.sum()], rate=1.0, longest=2.0)
    assert weight.model.weight.item() == pytest.approx(2)


def test_a_batch_whose_gradients_are_no_numbers_is_left_out_on_the_device_too() -> None:
    def learn(losses: list[float]) -> tuple[float, Any]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], fused=True, capturable=True)
        for loss in losses:
            descend(optimizer, [loss * weight.sum()], rate=torch.tensor(0.5), longest=1.0)
        return weight.item(), optimizer.state_dict()["state"]

    learned = learn([-1.0, -0.5])
    assert learned[0] == pytest.approx(1, abs=0.1)
    assert learn([torch.nan, -1.0, torch.inf, -0.5]) == learned


def test_a_training_without_its_data_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sayings\.pt is not there: run python -m training\.wave_data first\.$"):
        Sayings.load(tmp_path)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_no_minutes_are_refused_in_one_sentence(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_options("Trains.").parse_args(["--out", "none", "--minutes", minutes])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"{minutes} is no length of time: give minutes above 0, such as 8 or 0.5.")
