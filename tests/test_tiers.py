"""CONTRIBUTING.md says which test holds a promise, and which command runs it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parent
CONTRIBUTING = TESTS.parent / "CONTRIBUTING.md"
RELIABILITY = TESTS.parent / "docs" / "operate" / "reliability.md"
COMMANDS = {"cluster": "make test-cluster", "full": "make test-all"}
"""What runs a test that is marked so."""
ORDER = ("make test", *COMMANDS.values())


def table() -> dict[str, str]:
    """Tests of the table, each with its command."""
    rows = re.findall(r"^\| [^|]+ \| (`test_[^|]+) \| `(make [a-z-]+)` \|$", CONTRIBUTING.read_text(), re.MULTILINE)
    return {name: command for names, command in rows for name in re.findall(r"`(test_\w+)`", names)}


def commands() -> dict[str, str]:
    """Every test, with the command that runs it; with the first of them, where several do."""
    modules = {path: ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}
    classes = {node.name: node for module in modules.values() for node in module.body if isinstance(node, ast.ClassDef)}
    found: dict[str, str] = {}
    for path, module in modules.items():
        if path.name.startswith("test_"):
            for name, command in _commands_of(module, classes):
                found[name] = min(command, found.get(name, command), key=ORDER.index)
    return found


def _commands_of(module: ast.Module, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    of_all = [
        ast.unparse(node) for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    for node in module.body:
        for test in _tests_of(node, classes):
            marks = " ".join([*of_all, *map(ast.unparse, test.decorator_list)])
            marked = [command for mark, command in COMMANDS.items() if f"pytest.mark.{mark}" in marks]
            yield test.name, marked[-1] if marked else ORDER[0]


def _tests_of(node: ast.stmt, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A function that is a test, or those of a class and of what it is made of."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
        yield node
    if isinstance(node, ast.ClassDef):
        bases = [classes[name] for base in node.bases if (name := ast.unparse(base)) in classes]
        for inner in itertools.chain(node.body, *(_tests_of(base, classes) for base in bases)):
            yield from _tests_of(inner, classes)


def test_the_table_has_each_test_with_the_command_that_runs_it() -> None:
    told, true = table(), commands()
    assert len(told) > 20
    assert told == {name: true.get(name, "no test of that name") for name in told}


def test_each_promise_of_reliability_is_in_the_table() -> None:
    page = RELIABILITY.read_text()
    promises = page[: page.index("## How")]
    named = set(re.findall(r"`(test_\w+)`", promises))
    assert named and named <= set(table())
