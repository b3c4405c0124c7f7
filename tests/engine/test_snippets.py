"""The pages' program without Ray: its engines import the script again, so it runs as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import Block, blocks_of


@pytest.mark.full
@pytest.mark.parametrize("block", blocks_of("offline"), ids=str)
def test_a_program_with_engines_of_its_own_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "array" in done.stdout
