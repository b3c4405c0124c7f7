"""Pages, help texts, errors and log lines have the words of the field, and none that only this project had."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

DEVELOPERS = ("understand", "extend")
"""Parts whose readers have the code before them, where some of these words are names of classes."""
OLD = {
    "whoever": "all that ...",
    "nobody": "no client, no process",
    "begun again": "retried",
    "begins? (it |them )?again": "restarts, retries",
    "anew": "again, re-",
    "suspects?": "quarantined",
    "voices at once": "concurrent streams",
    "hand-overs?": "transfer",
    "parcels?": "message",
    "let go of": "cancelled, released",
    "lets go": "cancels, releases",
    "stands? still": "stalls",
    "stood still": "stalled",
    "breaks? off": "ends",
    "broken off": "cancelled",
    "strangers?": "unauthenticated connections",
    "greetings?": "handshake",
    "at the door": "in admission control",
    "gives? it up": "abandons",
    "the card's end": "saturation",
}
"""What this project said, and what the field says. Metrics and configuration are pages too: the code says them."""
OLD_FOR_USERS = {
    "rows?": "hidden states",
    "outbox(es)?": "output buffer",
    "rooms?": "space, memory",
    "pieces?": "chunk",
    "takes? (a|no) places?": "takes a slot",
    "heard": "read, played",
    "listeners?": "clients",
    "beats?": "heartbeat",
    "visits?": "request",
    "who": "which",
}
"""Names of code too, which pages for its developers have."""
ROWS_OF_TABLES = ("batch.md", "row.py", "dataset.py", "CONTRIBUTING.md", "monitoring.md")
"""A dataset has rows, and so have Grafana's boards."""
SHOWN = (ROOT / "deploy", ROOT / "stage_configs", ROOT / "examples")
"""Boards, and files that an operator copies and changes."""
VOCABULARY = "time year people"
"""Of the messages that `omni-cluster bench` sends."""
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def old_words(text: str, *, name: str = "", for_users: bool = True) -> list[str]:
    words = [*OLD, *(OLD_FOR_USERS if for_users else ())]
    words = [word for word in words if word != "rows?" or name not in ROWS_OF_TABLES]
    return [word for word in words if re.search(rf"\b{word}\b", text, re.IGNORECASE)]


def strings(module: ast.Module) -> Iterator[str]:
    """What the code may say to its users: its sentences without docstrings, which are expressions of their own."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def sentences(path: Path) -> Iterator[str]:
    """Those of a module; a name alone is none. In a vocabulary, words are no one's."""
    for text in strings(ast.parse(path.read_text())):
        if " " in text.strip() and not text.startswith(VOCABULARY):
            yield text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_none_of_the_old_words(page: Path) -> None:
    for_users = page.parent.name not in DEVELOPERS and page.name != "CONTRIBUTING.md"
    assert old_words(CODE.sub("", page.read_text()), name=page.name, for_users=for_users) == []


def test_errors_help_and_log_lines_have_none_of_the_old_words() -> None:
    paths = sorted((ROOT / "omni_cluster").rglob("*.py"))
    found = {(path.name, text) for path in paths for text in sentences(path) if old_words(text, name=path.name)}
    assert found == set()


def test_boards_and_files_to_copy_have_none_of_the_old_words() -> None:
    files = [path for folder in SHOWN for path in folder.rglob("*") if path.suffix in (".yaml", ".sh", ".json")]
    assert len(files) > 10
    said = {path: re.sub(r'"type": "row"', "", path.read_text()) for path in files}
    assert {path.name: found for path, text in said.items() if (found := old_words(text))} == {}


def test_an_old_word_is_found() -> None:
    assert old_words("A request is begun again.") == ["begun again"]
    assert old_words("Rows in `outbox_max_bytes`") == ["rows?"]
    assert old_words("Rows.", for_users=False) == [] == old_words("Rows.", name="batch.md")
    assert list(strings(ast.parse('"""Nobody."""\nraise Error(f"nobody is {x}")'))) == ["nobody is "]
