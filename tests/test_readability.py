"""Words and reading ease of a text are what one counts by hand."""

from __future__ import annotations

import pytest

from tests.pages import ROOT
from tools.readability import pages, prose, reading_ease, syllables, words

PAGE = """# A title

The cat sat. See [the mat](mat.md) and `a_name`.

| cell | two words |
|---|---|

```bash
make demo
```
"""


def test_words_are_counted_without_bars_and_blocks() -> None:
    assert words(PAGE) == len(
        ["A", "title", "The", "cat", "sat", "See", "the", "mat", "and", "a_name", "cell", "two", "words"]
    )


def test_prose_has_neither_tables_nor_names() -> None:
    assert prose(PAGE).split() == ["The", "cat", "sat.", "See", "the", "mat", "and", "it."]


@pytest.mark.parametrize(("word", "count"), [("cat", 1), ("made", 1), ("table", 2), ("replica", 3), ("the", 1)])
def test_syllables(word: str, count: int) -> None:
    assert syllables(word) == count


def test_the_index_is_flesch_s() -> None:
    assert reading_ease("The cat sat. The dog ran.") == pytest.approx(206.835 - 1.015 * 3 - 84.6)


def test_readme_and_all_pages_are_read() -> None:
    assert pages(ROOT)[0].name == "README.md" and len(pages(ROOT)) > 25
