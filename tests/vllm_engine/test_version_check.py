from __future__ import annotations

import pytest
from vllm import __version__
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from omni_cluster.errors import VersionError
from omni_cluster.vllm_engine.version_check import CHECKED_VLLM, check_vllm


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


def test_a_scheduler_that_does_not_look_at_the_eligible_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", Scheduler._free_request)
    with pytest.raises(VersionError, match=r"has no Scheduler\.schedule by eligible step"):
        check_vllm()
