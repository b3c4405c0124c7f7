"""Which cards a stage's processes see, and how they share them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from omni_cluster.config.schema import StageConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"
# CUDA reads it in a process that finds an MPS daemon.
MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
LOW_PRIORITY = "1"

# A long prompt's rows are copied some ten times on their way, each time into memory that was just asked for. In huge
# pages that takes a fraction of the time. glibc reads it from 2.35 on as a process starts.
HOST_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# One thread: what torch computes on the host is small, and idle threads that spin take the cores of other stages.
GPU_ENVIRONMENT = {**HOST_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
CPU_ENVIRONMENT = {
    **HOST_ENVIRONMENT,
    VARIABLE: "",
    # Several engines share the cores: no pinning to the first one, one thread each.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def stage_environment(stage: StageConfig) -> dict[str, str]:
    """What a process that runs one stage alone must find in its environment."""
    return (GPU_ENVIRONMENT if stage.gpus_per_replica else CPU_ENVIRONMENT) | card_environment(stage)


def card_environment(stage: StageConfig) -> dict[str, str]:
    """What a stage's processes must find in their environment before they first use CUDA."""
    environment = {}
    if stage.gpus is not None:
        environment[VARIABLE] = ",".join(map(str, stage.gpus))
    if stage.card_priority == "low":
        environment[MPS_PRIORITY] = LOW_PRIORITY
    return environment


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started inside find these variables, and all others as they are."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def visible_cards(gpus: Sequence[int] | None) -> Iterator[None]:
    """Processes that are started inside see exactly these cards; None: all that this process sees."""
    with environment({} if gpus is None else {VARIABLE: ",".join(map(str, gpus))}):
        yield
