"""What an engine that is idle learns of a card on which nothing can be computed any more."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

from omni_cluster.vllm_engine.device import Device

BROKEN = "CUDA error: an illegal memory access was encountered"


class Event:
    """What a card of which the end has not been noticed yet is given, and what it says of it the next time."""

    def __init__(self) -> None:
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def query(self) -> bool:
        assert self._is_recorded
        raise torch.AcceleratorError(BROKEN)


def broken(patch: Callable[[object, str, object], None]) -> None:
    """Torch, as on a card that broke."""
    patch(torch.cuda, "is_initialized", lambda: True)
    patch(torch.cuda, "Event", Event)


def test_a_process_that_has_used_no_card_does_not_begin_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = Device()
    for _ in range(2):
        device.ask()
        device.end_without()


def test_an_error_that_nobody_asked_about_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch.setattr)
    device = Device()
    device.ask()
    with pytest.raises(torch.AcceleratorError, match=BROKEN):
        device.ask()


def test_an_engine_whose_card_broke_ends_and_says_why() -> None:
    code = """
        from omni_cluster.vllm_engine.device import DEVICE
        from tests.vllm_engine.test_device import broken
        broken(setattr)
        DEVICE.end_without()
        print("asked", flush=True)
        DEVICE.end_without()
        print("it goes on")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stdout.split() == ["asked"]
    assert f"this engine ends: its device computes nothing more: {BROKEN}" in ended.stderr


@pytest.mark.gpu
def test_a_card_that_computes_has_no_error() -> None:
    torch.zeros(1, device="cuda") + 1
    device = Device()
    for _ in range(3):
        device.ask()
