"""Which cards a stage's processes see, and how they share them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from omni_cluster.config.schema import StageConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"
# Read by CUDA in a process that finds an MPS daemon, else by nobody.
MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
MPS_PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
LOW_PRIORITY = "1"


def card_environment(stage: StageConfig) -> dict[str, str]:
    """What a stage's processes must find in their environment before they first use CUDA."""
    environment = {}
    if stage.gpus is not None:
        environment[VARIABLE] = ",".join(map(str, stage.gpus))
    if stage.card_priority == "low":
        environment[MPS_PRIORITY] = LOW_PRIORITY
    if stage.card_percent is not None:
        environment[MPS_PERCENT] = str(stage.card_percent)
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
