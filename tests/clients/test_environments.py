"""A client whose packages cannot be had is told in one sentence, and nothing half made is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.environments import node_of, python_of
from tests.packages import NoPackages

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments are made in a folder of the test, and no registry answers."""
    monkeypatch.setattr(environments, "CACHE", tmp_path)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "npm_config_registry"):
        monkeypatch.setenv(name, NOWHERE)
    for name, value in {"UV_HTTP_RETRIES": "0", "npm_config_fetch_retries": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    return tmp_path


@pytest.mark.parametrize("make", [lambda: python_of("instructor"), lambda: node_of("node")], ids=["python", "node"])
def test_without_a_registry(elsewhere: Path, make: Callable[[], Path]) -> None:
    with pytest.raises(NoPackages, match=r"registry\.$|is not installed, so the packages cannot be had\.$"):
        make()
    assert not list(elsewhere.glob("*.whole"))


def test_what_is_pinned_and_does_not_exist_is_no_matter_of_the_network(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "broken.txt").write_text("broken==\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", elsewhere)
    try:
        with pytest.raises(RuntimeError, match=r"broken\.txt"):
            python_of("broken")
    except NoPackages as reason:
        pytest.skip(str(reason))
