"""Served applications: three engines and more take half a minute to start, so modules in a row share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.cluster.served import FULL_DISK, KEY, ROOT, ServedApp, long_checkpoint, serve_run, serve_run_over_nodes

NOBODY = "http://127.0.0.1:9"
"""Where nothing listens: vLLM makes spans of requests that are traced, and they go where Serve's go."""


class Shared:
    """An application that several modules in a row use, from the first test that asks for it on.

    It is started once: where it did not come up, all tests that ask for it fail at once with what it printed.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[ServedApp]]) -> None:
        self._start = start
        self._running: ServedApp | None = None
        self._failure: AssertionError | None = None
        self._cleanup = ExitStack()

    def app(self) -> ServedApp:
        if self._failure is not None:
            raise self._failure
        if self._running is None:
            try:
                self._running = self._cleanup.enter_context(self._start())
            except AssertionError as failure:
                self._failure = failure
                raise
        return self._running

    def stop(self) -> None:
        self._running = None
        self._cleanup.close()


@contextmanager
def _apart() -> Iterator[ServedApp]:
    """The default with each stage on a node of its own."""
    config = _default()
    with TemporaryDirectory() as folder, _over_nodes(config, Path(folder) / "apart.yaml") as app:
        yield app


@contextmanager
def _over_nodes(config: dict[str, Any], path: Path) -> Iterator[ServedApp]:
    """Each stage on a node of its own, and the ingresses on that of the last stage, the head."""
    roles = [stage["model_stage"] for stage in config["stages"]]
    for stage, role in zip(config["stages"], roles, strict=True):
        stage["placement"] = {"label_selector": {"role": role}}
    path.write_text(yaml.safe_dump(config | {"ingress_placement": {"label_selector": {"role": roles[-1]}}}))
    with serve_run_over_nodes(f"config={path}", roles=roles[::-1], system_config=FULL_DISK) as app:
        yield app


def _default() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text())
    return config


@contextmanager
def _watched() -> Iterator[ServedApp]:
    config = _default()
    config["model"] = str(long_checkpoint())
    config["limits"] |= {"max_prompt_tokens": 28_000}
    for stage in config["stages"][:2]:
        stage["engine_args"] |= {"max_model_len": 32_768, "otlp_traces_endpoint": NOBODY}
    config["ingress_replicas"] = 2
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"{KEY}\n")
        with _over_nodes(config | {"api": {"keys_file": str(keys)}}, Path(folder) / "watched.yaml") as app:
            yield app


_shared = {"served": Shared(serve_run), "watched": Shared(_watched)}
_ROWS = ("served", "ended", "watched")
"""Fixtures, in the order of the modules that use them."""
_users: dict[str, set[Path]] = {}
"""The modules that use each application."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share an application come in a row, wherever the others are: it starts once."""
    rows = {name: {item.path for item in items if name in getattr(item, "fixturenames", ())} for name in _ROWS}
    _users.update(served=rows["served"] | rows["ended"], watched=rows["watched"])
    ranks = {path: rank for rank, name in enumerate(_ROWS) for path in rows[name]}
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[i] for i in places), key=lambda item: ranks.get(item.path, len(_ROWS)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    is_last_of_module = nextitem is None or nextitem.path != item.path
    for name, shared in _shared.items():
        if is_last_of_module and (nextitem is None or nextitem.path not in _users[name]):
            shared.stop()  # the next module may start another application, and a host has room for one


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Iterator[dict[str, Shared]]:
    if request.config.getoption("--apart"):
        _shared["served"] = Shared(_apart)
    yield _shared
    for each in _shared.values():
        each.stop()


@pytest.fixture(scope="module")
def served(shared: dict[str, Shared]) -> ServedApp:
    """`serve run deployments:app`, without arguments: one for all modules in a row that ask for it."""
    return shared["served"].app()


@pytest.fixture(scope="module")
def ended(shared: dict[str, Shared]) -> ServedApp:
    """`served` once all others are done with it: it may get another configuration, and be ended."""
    return shared["served"].app()


@pytest.fixture(scope="module")
def watched(shared: dict[str, Shared]) -> ServedApp:
    """The default with a second ingress and prompts of 28,000 tokens, each stage on a node of its own, whose disk is
    full for Ray; clients need `KEY`. One for modules in a row.
    """
    return shared["watched"].app()


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
