"""Which cards a stage's processes see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

VARIABLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def visible_cards(gpus: Sequence[int] | None) -> Iterator[None]:
    """Processes that are started inside see exactly these cards; None: all that this process sees."""
    if gpus is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(map(str, gpus))
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
