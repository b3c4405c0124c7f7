"""What a replica does until it serves: in its log, for whoever waits for it, and with the times of its last start."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from omni_cluster.cluster.serve_private import kv_delete, kv_get, kv_list, kv_put
from omni_cluster.config.caches import cache_folder

logger = logging.getLogger("ray.serve")

NAMESPACE = b"omni_cluster"
"""Of Ray's own store of keys and values, which is there before any replica."""
PREFIX = b"starting/"


class Starting:
    """The steps of one replica's start, each published as it begins. Of several replicas, those who wait see one."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._key = PREFIX + stage.encode()
        self._times = StepTimes(cache_folder() / "starts" / f"{stage}.json")

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step, with the time that it took when this host last did it."""
        usual_s = self._times.usual_s(what)
        said = what if usual_s is None else f"{what}, usually {usual_s:.0f} s"
        logger.info("%s: %s", self._stage, said)
        kv_put(self._key, said.encode(), namespace=NAMESPACE)
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        self._times.remember(what, took_s)
        logger.info("%s: %s took %.1f s", self._stage, what, took_s)

    def ended(self) -> None:
        """The start is over. What was made until now stays, so later garbage collections skip it."""
        gc.freeze()
        kv_delete(self._key, namespace=NAMESPACE)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Imports make a million objects, none of them garbage; looking for garbage takes a quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def steps_now() -> dict[str, str]:
    """The step of each stage of this cluster that starts, or broke off while it did."""
    steps = {}
    for key in kv_list(PREFIX, namespace=NAMESPACE):
        said = kv_get(key, namespace=NAMESPACE)
        if said is not None:  # else it has ended meanwhile
            steps[key.removeprefix(PREFIX).decode()] = said.decode()
    return steps


class StepTimes:
    """How long each step of a stage's start took when this host last did it. What cannot be written is not kept."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def usual_s(self, step: str) -> float | None:
        seconds = self._read().get(step)
        return float(seconds) if isinstance(seconds, int | float) else None

    def remember(self, step: str, seconds: float) -> None:
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent)
            with os.fdopen(handle, "w") as file:
                json.dump({**self._read(), step: round(seconds, 1)}, file)
            os.replace(name, self._file)  # replicas of one stage write it side by side

    def _read(self) -> dict[str, object]:
        try:
            times = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return times if isinstance(times, dict) else {}
