"""The folders of `examples/`: each is listed, small, and asks for the versions that are tested."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import tomllib

from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from tests.commands import lines_of
from tests.example_folders import EXAMPLES, RATE_HZ, SPEECH, samples_of
from tests.pages import ROOT, blocks_in

FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
MOST_LINES = 120
"""Of a program that one copies."""


def test_each_folder_is_listed_and_says_what_it_is() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert sorted(name for name in FOLDERS if f"[{name}]({name}/README.md)" in readme) == FOLDERS
    assert [name for name in FOLDERS if not (EXAMPLES / name / "README.md").exists()] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_a_program_to_copy_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_scripts_of_curl_can_be_run_and_say_what_they_do() -> None:
    scripts = sorted((EXAMPLES / "curl").glob("*.sh"))
    assert len(scripts) > 10
    assert [path.name for path in scripts if not os.access(path, os.X_OK)] == []
    assert [path.name for path in scripts if not path.read_text().startswith("#!/usr/bin/env bash\n# ")] == []


def test_the_talk_in_python_asks_for_the_versions_that_are_tested() -> None:
    """`tests/clients` has the same of the bots."""
    asked = (EXAMPLES / "realtime_python" / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    assert asked and set(asked) <= ours


def test_the_page_s_readme_makes_a_configuration_that_lets_it_in(tmp_path: Path) -> None:
    page = EXAMPLES / "realtime_browser" / "README.md"
    make, *_ = [line for block in blocks_in(page.name, page.read_text()) for line in lines_of(block.text)]
    subprocess.run(["bash", "-euc", make.replace("my.yaml", str(tmp_path / "my.yaml"))], cwd=ROOT, check=True)
    config = load_config(tmp_path / "my.yaml", known_families=known_families())
    (origin,) = config.api.cors_origins
    assert f"<{origin}/>" in page.read_text()


def test_the_speech_is_what_the_examples_take() -> None:
    assert RATE_HZ / 2 < len(samples_of(SPEECH)) < 2 * RATE_HZ
