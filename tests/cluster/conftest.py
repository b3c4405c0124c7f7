"""Served applications: three engines and more take half a minute to start, so modules in a row share one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import yaml

from tests.cluster.served import KEY, ROOT, ServedApp, serve_run


class Shared:
    """The application of `served`, from the first test that asks for it on."""

    def __init__(self) -> None:
        self._running: ServedApp | None = None
        self._cleanup = ExitStack()

    def app(self) -> ServedApp:
        if self._running is None:
            self._running = self._cleanup.enter_context(serve_run())
        return self._running

    def stop(self) -> None:
        self._running = None
        self._cleanup.close()


_shared = Shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    is_last_of_module = nextitem is None or nextitem.path != item.path
    if is_last_of_module and "served" not in getattr(nextitem, "fixturenames", ()):
        _shared.stop()  # the next module may start another application, and a host has room for one


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    yield _shared
    _shared.stop()


@pytest.fixture(scope="module")
def served(shared: Shared) -> ServedApp:
    """`serve run deployments:app`, without arguments: one for all modules in a row that ask for it."""
    return shared.app()


@pytest.fixture(scope="module")
def served_2x2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two thinkers, two talkers, a code2wav that gets a second replica when it has more than two jobs; few may wait.

    Bodies have to come quickly, and little may be left unread. Clients need `KEY`, and may name media on this machine
    by URL.
    """
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml").read_text())
    del config["stages"][2]["num_replicas"]
    config["stages"][2]["autoscaling"] = {"max_replicas": 2, "target": 2, "upscale_delay_s": 0.5}
    config["limits"] |= {"max_ongoing_requests": 12, "max_queued_requests": 24}
    config["limits"] |= {"upload_timeout_s": 3, "max_unread_bytes": 262_144}
    config["fetch"] = {"allow_private": True}
    path = tmp_path_factory.mktemp("config") / "autoscaled.yaml"
    config["api"] = {"keys_file": str(path.with_name("keys.txt")), "cors_origins": ["https://app.example"]}
    path.with_name("keys.txt").write_text(f"# the tests'\n{KEY}\n")
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app
