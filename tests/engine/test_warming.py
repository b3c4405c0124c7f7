"""`omni-cluster warm`: each engine is started once, as a replica would, and ends."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from omni_cluster.cli import main
from tests.configs import TINY_CONFIG
from tests.processes import command_line

pytestmark = pytest.mark.full

UP = re.compile(r"(\w+): its engine was up after \d+\.\d s")


def test_each_engine_is_started_once_with_the_folder_as_its_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "kept", tmp_path / "warmed.yaml"
    path.write_text(f"cache_dir: {folder}\n{TINY_CONFIG.read_text()}")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert main(["warm", str(path)]) == 0
    first, *lines, last = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"Python modules: \d+ compiled, \d+ could not be", first)
    assert [each and each[1] for each in map(UP.fullmatch, lines)] == ["thinker", "talker", "code2wav"]
    assert re.fullmatch(rf"{folder}: [1-9]\d* files, \d+\.\d MiB", last)
    # On a CPU these engines compile nothing. What vLLM notes of their models is there.
    assert list((folder / "vllm" / "modelinfos").iterdir())
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if "resource_tracker" not in command_line(child)]
