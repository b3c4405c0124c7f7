"""docs/understand/ names files of the code: they are there, and those of a walk are as many as contracts.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "understand"
PACKAGE = ROOT / "omni_cluster"
FOLDERS = (PACKAGE, PACKAGE / "vllm_engine", ROOT)
"""A name is from one of these on."""
MOST = {
    "The walk of a chat with sound": 30,
    "The walk of a conditioning row": 18,
    "The walk of a killed replica": 22,
    "What to read": 20,
}


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def paths(text: str) -> set[str]:
    """Files that are named with their folder."""
    names = re.findall(r"`([\w<>]+/[\w/<>]+\.py)`", text)
    return {name.replace("<family>", "qwen2_5_omni") for name in names}


def files(text: str) -> set[str]:
    """All files. One without its folder was named before, or is beside the one before it."""
    full = paths(text)
    return full | set(re.findall(r"`(\w+\.py)`", text)) - {path.rpartition("/")[2] for path in full}


def is_there(path: str) -> bool:
    return any((folder / path).is_file() for folder in FOLDERS)


@pytest.mark.parametrize("title", MOST)
def test_a_walk_has_as_many_files_as_it_says(title: str) -> None:
    text = section((PAGES / "contracts.md").read_text(), title)
    (said,) = re.findall(r"\b(\d+) files", text)
    assert len(files(text)) == int(said) <= MOST[title]


def test_files_that_are_named_are_there() -> None:
    named = set().union(*(paths(page.read_text()) for page in PAGES.glob("*.md")))
    assert len(named) > 60 and [path for path in sorted(named) if not is_there(path)] == []


def test_one_that_is_not_there_is_found() -> None:
    assert not is_there("models/nothing.py") and files("`a/b.py`, `c.py`, `b.py`") == {"a/b.py", "c.py"}
