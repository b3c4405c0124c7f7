"""One command makes a checkpoint from nothing, in several runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from training.__main__ import MINUTES, steps

ROOT = Path(__file__).parents[2]


def run(out: Path, *options: str) -> str:
    """At a five-hundredth of the data and a hundredth of the minutes."""
    shares = ("--minutes-share", "0.01", "--data-share", "0.002")
    command = [sys.executable, "-m", "training", "--out", str(out), *shares, *options]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("espeak")
def test_a_checkpoint_of_the_shipped_one_s_shape_comes_of_several_runs(tmp_path: Path) -> None:
    first = run(tmp_path, "--at-most", "0.05")
    assert "time is over" in first and not (tmp_path / "checkpoint").exists()
    ended = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.done")}
    assert f"{tmp_path / 'checkpoint'} is the checkpoint." in run(tmp_path)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in ended} == ended
    shipped = Qwen2_5Omni.embedded_checkpoint("toy")
    assert shapes(tmp_path / "checkpoint") == shapes(shipped)
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    assert "step:" not in run(tmp_path)  # all is done: nothing is begun again


def test_each_training_gets_its_minutes_or_what_is_left(tmp_path: Path) -> None:
    trainings = [step for step in steps(tmp_path, 0.5, 1) if step.minutes is not None]
    assert {step.module: step.minutes for step in trainings} == {name: each / 2 for name, each in MINUTES.items()}
    commands = [step.command(0.25) for step in trainings]
    assert all(command[command.index("--at-most") + 1] == "0.25" for command in commands)
    assert not any("--at-most" in step.command(None) for step in trainings)


def test_a_share_of_the_data_is_never_none(tmp_path: Path) -> None:
    for step in steps(tmp_path, 1, 1e-6):
        counts = {name: value for name, value in step.options.items() if isinstance(value, int)}
        assert all(value > 0 for value in counts.values())
