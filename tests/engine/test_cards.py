"""The cards that a stage's processes see."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omni_cluster.config.schema import StageConfig
from omni_cluster.engine.cards import VARIABLE, card_environment, visible_cards

PRINT = f"import os; print(os.environ.get({VARIABLE!r}))"


def seen_by_a_child() -> str:
    return subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("before", [None, "5,6"])
def test_a_process_started_inside_sees_these_cards_only(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with visible_cards([2, 0]):
        assert seen_by_a_child() == "2,0"
    assert seen_by_a_child() == str(before)


def test_without_cards_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    with visible_cards(None):
        assert seen_by_a_child() == "7"


def test_an_error_inside_leaves_the_cards_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    with pytest.raises(KeyError), visible_cards([1]):
        raise KeyError
    assert seen_by_a_child() == "7"


def test_a_stage_says_its_cards_and_its_share_of_them() -> None:
    plain = StageConfig(stage_id=0, model_stage="code2wav", num_gpus=1)
    assert card_environment(plain) == {}
    sharing = StageConfig(stage_id=0, model_stage="code2wav", gpus=[1], card_priority="low", card_percent=70)
    assert card_environment(sharing) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70",
    }
