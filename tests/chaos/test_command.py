"""What `make chaos` asks for."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.__main__ import asked
from tests.chaos.soak import Plan


def test_the_command_line_changes_a_soak_of_ten_minutes() -> None:
    assert asked([]) == (Plan(600.0, 16, 15.0, 0), None)
    assert asked(["--seconds", "60", "--seed", "3", "--out", "a.json"]) == (Plan(60.0, 16, 15.0, 3), Path("a.json"))
