"""What the lines of a start say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omni_cluster.cluster import starting
from omni_cluster.cluster.starting import start_step


def test_a_step_is_published_as_it_begins_and_logged_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    published, logged = list[str](), list[str]()
    monkeypatch.setattr(starting, "kv_put", lambda _key, said, namespace: published.append(said.decode()))
    monkeypatch.setattr(starting, "logger", SimpleNamespace(info=lambda said, *of: logged.append(said % of)))
    monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=iter([100.0, 112.3]).__next__))
    with start_step("talker", "starts the engine"):
        assert (published, logged) == (["starts the engine"], ["talker: starts the engine"])
    assert logged[1:] == ["talker: starts the engine took 12.3 s"]
