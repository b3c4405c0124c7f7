from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
import tomllib
from ray.serve.request_router import RequestRouter

from omni_cluster.cluster.app import bind_app, config_of
from omni_cluster.cluster.serve_private import CHECKED_RAY, PRIVATE, check_ray
from omni_cluster.types.errors import VersionError
from tests.served.app import ROOT
from tests.used_names import UsedNames, is_private

ONE_MODULE = "serve_private.py"
TREES = {path.name: ast.parse(path.read_text()) for path in sorted((ROOT / "omni_cluster" / "cluster").glob("*.py"))}
CLUSTER = UsedNames(TREES, "ray")
OTHERS = UsedNames({name: tree for name, tree in TREES.items() if name != ONE_MODULE}, "ray")
OF_OTHERS = {"_exit": "os's"}
PRIVATE_PATH = re.compile(r"[.:]_|\.internal_kv")


def test_private_names_are_imported_in_one_module_alone() -> None:
    assert [path for path in OTHERS.imports() if PRIVATE_PATH.search(path)] == []
    assert any(PRIVATE_PATH.search(path) for path in CLUSTER.imports())


def test_private_attributes_that_are_used_are_listed_and_those_listed_are_used() -> None:
    used = {name for name in CLUSTER.members() if is_private(name)}
    listed = {name for names in PRIVATE.values() for name in names}
    assert used - set(OF_OTHERS) == {name for name in listed if is_private(name)}
    read = {node.attr for node in ast.walk(TREES[ONE_MODULE]) if isinstance(node, ast.Attribute)}
    assert {name for name in listed if not is_private(name)} <= read
    assert set(OF_OTHERS) <= used


def test_the_installed_ray_has_them_and_is_the_pinned_one() -> None:
    check_ray()
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={CHECKED_RAY}" in dependencies


def test_a_ray_without_one_is_refused_before_anything_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RequestRouter, "_record_queue_wait_time")
    with pytest.raises(VersionError, match=rf"has no RequestRouter\._record_queue_wait_time; .*{CHECKED_RAY}"):
        bind_app(config_of({}))


def test_a_ray_without_a_private_module_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.modules['ray.serve._private.common'] = None; import omni_cluster.cluster.serve_private"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(r"VersionError: Ray \S+ has no ray\.serve\._private\.common.*install that\.", done.stderr)
