"""The cards that a stage's processes see."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from omni_cluster.config.schema import StageConfig
from omni_cluster.engine.cards import (
    HOST_ENVIRONMENT,
    VARIABLE,
    card_environment,
    stage_environment,
    visible_cards,
)

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


def test_a_stage_says_its_cards_and_its_priority_on_them() -> None:
    plain = StageConfig(stage_id=0, model_stage="code2wav", num_gpus=1)
    assert card_environment(plain) == {}
    sharing = StageConfig(stage_id=0, model_stage="code2wav", gpus=[1], card_priority="low")
    assert card_environment(sharing) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_CLIENT_PRIORITY": "1"}


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HELD_BYTES = 64 << 20
IN_HUGE_PAGES = f"held = bytearray({HELD_BYTES}); print(open('/proc/self/smaps_rollup').read())"


def huge_page_bytes(variables: dict[str, str]) -> int:
    """What a process that holds `HELD_BYTES` has in huge pages."""
    unset = {name: value for name, value in os.environ.items() if name not in HOST_ENVIRONMENT}
    command = [sys.executable, "-c", IN_HUGE_PAGES]
    printed = subprocess.run(command, env=unset | variables, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("AnonHugePages")]
    return int(line.split()[1]) << 10


def has_no_huge_pages() -> bool:
    glibc = tuple(map(int, platform.libc_ver()[1].split(".") if platform.libc_ver()[0] == "glibc" else (0, 0)))
    return glibc < (2, 35) or not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text()


@pytest.mark.skipif(has_no_huge_pages(), reason="the host gives huge pages to nobody, or to everybody")
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_large_memory_of_a_stages_processes_is_in_huge_pages(num_gpus: int) -> None:
    stage = StageConfig(stage_id=0, model_stage="thinker", num_gpus=num_gpus)
    assert huge_page_bytes({}) < HELD_BYTES // 4
    assert huge_page_bytes(stage_environment(stage)) > HELD_BYTES // 4
