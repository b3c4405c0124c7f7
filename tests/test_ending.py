"""The tests' own process ends with pytest's status, whatever Ray's threads do then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = """
import atexit, os, sys, types

def test_it():
    sys.modules["ray"] = types.ModuleType("ray")
    atexit.register(os.abort)
    assert {passes}
"""


@pytest.mark.parametrize("passes", [True, False])
def test_the_status_is_pytests_though_python_would_crash_at_its_end(tmp_path: Path, passes: bool) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TEST.format(passes=passes))
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "tests.ending", "-p", "no:cacheprovider", file]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to import
    ended = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    assert ended.returncode == (0 if passes else 1), ended.stderr
    assert f"1 {'passed' if passes else 'failed'}" in ended.stdout
