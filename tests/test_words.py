"""Pages, help texts, errors and log lines have the words of the field, and none that only this project had."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OLD = {
    "whoever": "all that ...",
    "nobody": "no client, no process",
    "begun again": "retried",
    "suspect": "-",
    "voices at once": "concurrent streams",
}
"""Each with what is said now. Metrics and configuration are pages too: they are generated of what the code says."""
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def old_words(text: str) -> list[str]:
    return [word for word in OLD if re.search(rf"\b{word}", text, re.IGNORECASE)]


def strings(module: ast.Module) -> Iterator[str]:
    """What the code may say to its users: its texts without docstrings, which are expressions of their own."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_none_of_the_old_words(page: Path) -> None:
    assert old_words(CODE.sub("", page.read_text())) == []


def test_errors_help_and_log_lines_have_none_of_the_old_words() -> None:
    paths = sorted((ROOT / "omni_cluster").rglob("*.py"))
    found = {(path.name, text) for path in paths for text in strings(ast.parse(path.read_text())) if old_words(text)}
    assert found == set()


def test_an_old_word_is_found() -> None:
    assert old_words("A request is begun again.") == ["begun again"]
    assert list(strings(ast.parse('"""Nobody."""\nraise Error(f"nobody is {x}")'))) == ["nobody is "]
