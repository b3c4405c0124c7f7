"""What `make chaos` asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import Files, asked
from tests.chaos.soak import Plan


def test_the_command_line_changes_a_soak_of_ten_minutes() -> None:
    assert asked([]) == (Plan(600.0, 16, 15.0, 0), Files())
    changed = ["--seconds", "60", "--seed", "3", "--out", "a.json", "--log", "a.log"]
    assert asked(changed) == (Plan(60.0, 16, 15.0, 3), Files(Path("a.json"), Path("a.log")))


def test_a_configuration_may_have_another_checkpoint_and_nodes_of_cards() -> None:
    plan, _ = asked(["--config", "card.yaml", "--checkpoint", "made", "--cards-of-a-node", "2"])
    assert (plan.config, plan.checkpoint, plan.cards_of_a_node) == (Path("card.yaml"), Path("made"), 2)


@pytest.mark.parametrize("alone", [["--checkpoint", "made"], ["--cards-of-a-node", "2"]])
def test_what_is_for_a_configuration_is_refused_alone(capsys: pytest.CaptureFixture[str], alone: list[str]) -> None:
    with pytest.raises(SystemExit):
        asked(alone)
    assert "name one with --config" in capsys.readouterr().err
