"""What an engine that is idle learns of a card on which nothing can be computed any more."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from omni_cluster.vllm_engine.device import ask_device, end_without_device

BROKEN = "CUDA error: an illegal memory access was encountered"


def broken_stream() -> SimpleNamespace:
    def query() -> bool:
        raise torch.AcceleratorError(BROKEN)

    return SimpleNamespace(query=query)


def test_a_process_without_a_card_is_told_nothing() -> None:
    ask_device()
    end_without_device()


def test_a_process_that_never_used_its_card_does_not_begin_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", broken_stream)
    ask_device()


def test_an_error_that_nobody_asked_about_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", broken_stream)
    with pytest.raises(torch.AcceleratorError, match=BROKEN):
        ask_device()


def test_an_engine_whose_card_broke_ends_and_says_why() -> None:
    code = """
        import torch
        from omni_cluster.vllm_engine.device import end_without_device
        from tests.vllm_engine.test_device import broken_stream
        torch.cuda.is_initialized = lambda: True
        torch.cuda.current_stream = broken_stream
        end_without_device()
        print("it goes on")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and not ended.stdout
    assert f"this engine ends: its device computes nothing more: {BROKEN}" in ended.stderr


@pytest.mark.gpu
def test_a_card_that_computes_has_no_error() -> None:
    torch.zeros(1, device="cuda") + 1
    ask_device()
