"""docs/operate/security.md names the tests that show what it says: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "operate" / "security.md"


def named(page: str) -> set[str]:
    return set(re.findall(r"`((?:test_|Test)\w+)(?:\.py)?`", page))


def there() -> set[str]:
    """Functions, classes and files."""
    files = [*TESTS.rglob("test_*.py"), *TESTS.rglob("*_promises.py")]
    code = "\n".join(file.read_text() for file in files)
    defined = re.findall(r"^\s*(?:async def|def|class) ((?:test_|Test)\w+)", code, re.MULTILINE)
    return {*defined, *(file.stem for file in files)}


def test_each_test_that_the_page_names_is_there() -> None:
    names = named(PAGE.read_text())
    assert len(names) > 70
    assert names <= there(), names - there()


def test_one_that_is_not_there_is_found() -> None:
    assert named("| a fault | met | `test_of_nothing` |") - there() == {"test_of_nothing"}
