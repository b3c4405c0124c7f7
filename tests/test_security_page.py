"""docs/operate/security.md, and the note on published faults, name tests that show what they say: each is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "operate" / "security.md"
NOTE = TESTS.parent / "benchmarks" / "notes" / "2026-11-27-published-faults.md"


def named(page: str) -> set[str]:
    return set(re.findall(r"`((?:test_|Test)\w+)(?:\.py)?`", page))


def there() -> set[str]:
    """Functions, classes and files."""
    files = [*TESTS.rglob("test_*.py"), *TESTS.rglob("*_promises.py")]
    code = "\n".join(file.read_text() for file in files)
    defined = re.findall(r"^\s*(?:async def|def|class) ((?:test_|Test)\w+)", code, re.MULTILINE)
    return {*defined, *(file.stem for file in files)}


def test_each_test_that_the_page_names_is_there() -> None:
    on_page, in_note = named(PAGE.read_text()), named(NOTE.read_text())
    assert len(on_page) > 70 and len(in_note) > 15
    assert (on_page | in_note) - there() == set()


def test_one_that_is_not_there_is_found() -> None:
    assert named("| a fault | met | `test_of_nothing` |") - there() == {"test_of_nothing"}
