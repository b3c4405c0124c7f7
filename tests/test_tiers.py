"""CONTRIBUTING.md says which test holds a promise, and which command runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
CONTRIBUTING = TESTS.parent / "CONTRIBUTING.md"
RELIABILITY = TESTS.parent / "docs" / "reliability.md"
COMMANDS = {"cluster": "make test-cluster", "full": "make test-all"}
"""What runs a test that is marked so."""


def table() -> dict[str, str]:
    """Tests of the table, each with its command."""
    rows = re.findall(r"^\| [^|]+ \| (`test_[^|]+) \| `(make [a-z-]+)` \|$", CONTRIBUTING.read_text(), re.MULTILINE)
    return {name: command for names, command in rows for name in re.findall(r"`(test_\w+)`", names)}


def commands() -> dict[str, str]:
    """Every test, with the command that runs it."""
    found: dict[str, str] = {}
    for path in TESTS.rglob("test_*.py"):
        found.update(_commands_of(ast.parse(path.read_text())))
    return found


def _commands_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    of_all = [
        node for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(each) for each in [*node.decorator_list, *of_all])
            marked = [command for mark, command in COMMANDS.items() if f"pytest.mark.{mark}" in marks]
            yield node.name, marked[-1] if marked else "make test"


def test_the_table_has_each_test_with_the_command_that_runs_it() -> None:
    told, true = table(), commands()
    assert len(told) > 20
    assert told == {name: true.get(name, "no test of that name") for name in told}


def test_each_promise_of_reliability_is_in_the_table() -> None:
    page = RELIABILITY.read_text()
    promises = page[: page.index("## How")]
    named = set(re.findall(r"`(test_\w+)`", promises))
    assert named and named <= set(table())
