from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from vllm import __version__
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import stage_class
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import VersionError
from omni_cluster.vllm_engine.relied_on import CHECKED_VLLM
from omni_cluster.vllm_engine.version_check import check_names, check_vllm
from tests.configs import TINY_CONFIG


def test_installed_version_has_all_that_we_rely_on() -> None:
    check_vllm()
    assert __version__.startswith(CHECKED_VLLM)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "_free_request"),
        (GPUModelRunner, "_preprocess"),
        (GPUModelRunner, "_init_mrope_positions"),
        (GPUModelRunner, "_gather_mm_embeddings"),
    ],
)
def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(VersionError, match=rf"vLLM {__version__} has no {owner.__name__}\.{name}; .*{CHECKED_VLLM}"):
        check_vllm()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("vllm.v1.no_such_module:Request", r"vllm\.v1\.no_such_module\.Request"),
        ("vllm.v1.request:NoSuchRequest", r"vllm\.v1\.request\.NoSuchRequest"),
        ("vllm.v1.request:Request", r"Request\.no_such_attribute"),
        ("vllm.v1.engine:async_llm", r"async_llm\.no_such_attribute"),
    ],
)
def test_what_is_not_there_is_told_by_its_kind(path: str, told: str) -> None:
    with pytest.raises(VersionError, match=f"has no {told}; "):
        check_names({path: ("no_such_attribute",)}, {})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda self, request, more: None, r"has Scheduler\._free_request\(self, request, more\), but .*"),
        (
            lambda self, request: None,
            r".* which has Scheduler\._free_request\(self, request, delay_free_blocks=\.\.\.\)",
        ),
    ],
)
def test_a_method_that_is_called_in_another_way_is_named(
    monkeypatch: pytest.MonkeyPatch, changed: object, says: str
) -> None:
    monkeypatch.setattr(Scheduler, "_free_request", changed)
    with pytest.raises(VersionError, match=f"vLLM {__version__} {says}"):
        check_vllm()


def test_more_values_than_are_unpacked_are_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def six(*args: object, **kwargs: object) -> tuple[int, int, int, int, int, int]:
        raise NotImplementedError

    monkeypatch.setattr(GPUModelRunner, "_determine_batch_execution_and_padding", six)
    with pytest.raises(VersionError, match=r"_determine_batch_execution_and_padding\(\*args, \*\*kwargs\) -> "):
        check_vllm()


def test_a_scheduler_that_does_not_look_at_the_eligible_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: object) -> None: ...

    deaf.__signature__ = inspect.signature(Scheduler.schedule)  # type: ignore[attr-defined]
    monkeypatch.setattr(Scheduler, "schedule", deaf)
    with pytest.raises(VersionError, match=r"has no Scheduler\.schedule that looks up next_decode_eligible_step; "):
        check_vllm()


def test_a_stage_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(TINY_CONFIG, known_families=known_families())
    monkeypatch.delattr(Scheduler, "_free_request")
    for stage in config.stages:
        with pytest.raises(VersionError, match=r"has no Scheduler\._free_request"):
            stage_class(stage, config)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM loads its library for CPUs on a CPU alone")
def test_a_library_of_the_system_that_is_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnuma.so.1").touch()  # found before the system's, and none
    code = "from omni_cluster.vllm_engine.version_check import check_vllm; check_vllm()"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert re.search(r"Failed to import from vllm\._C.*libnuma\.so\.1", done.stdout + done.stderr)
    assert re.search(r"VersionError: .* could not load its library for CPUs, .*libnuma1\.$", done.stderr.strip())


def test_another_version_with_all_names_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="omni_cluster"):
        monkeypatch.setattr(vllm, "__version__", f"{CHECKED_VLLM}+cpu")
        check_vllm()
        assert caplog.messages == []
        monkeypatch.setattr(vllm, "__version__", "0.99.1")
        check_vllm()
        check_vllm()
    (told,) = caplog.messages
    assert "vLLM 0.99.1" in told
    assert f"install {CHECKED_VLLM}" in told
