"""What coverage traces: API and configuration as they are imported, and while their own tests run.

Tracing would add a third to the time of all else, and to what is collected.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOMS = ("openai_api", "config")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    tracer = _tracer(session.config)
    if tracer is not None and tracer.started:
        _import_rooms()
        tracer.pause()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    tracer = _tracer(item.config)
    if tracer is None:
        return (yield)
    if _is_traced(item) and not tracer.started:
        tracer.resume()
    try:
        return (yield)
    finally:  # threads that go on between two tests of a room stay traced
        if tracer.started and not _is_traced(nextitem):
            tracer.pause()


def _tracer(config: pytest.Config) -> Any:
    """What starts and stops coverage in a process that runs tests; None without `--cov`."""
    if config.pluginmanager.has_plugin("dsession"):
        return None
    return getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)


def _import_rooms() -> None:
    """All of them: the lines that define things run once."""
    for room in ROOMS:
        package = importlib.import_module(f"omni_cluster.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _is_traced(item: pytest.Item | None) -> bool:
    return item is not None and item.path.relative_to(TESTS).parts[0] in ROOMS
