"""How many words README and the pages have, and how easily their prose reads: `python -m tools.readability [FOLDER]`.

Flesch's reading ease: 206.8, less the words of a sentence and 84.6 times the syllables of a word. 60 is plain English,
30 a scientific text. Words are counted without bars of tables and code blocks; the index is of prose alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^ *\|.*$", re.MULTILINE)
HEADING = re.compile(r"^#.*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
SENTENCE = re.compile(r"[.!?](?=\s)|\n\s*\n|\n *(?:-|\d+\.) ")


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def words(page: str) -> int:
    """All that a reader reads, names in code too; not the bars of tables."""
    return len([word for word in LINK.sub(r"\1", BLOCK.sub("", page)).split() if re.search(r"\w", word)])


def prose(page: str) -> str:
    """A name in code counts as one word of one syllable."""
    return CODE.sub("it", LINK.sub(r"\1", HEADING.sub("", TABLE.sub("", BLOCK.sub("", page)))))


def syllables(word: str) -> int:
    groups = len(re.findall(r"[aeiouy]+", word.lower()))
    return max(1, groups - (word.endswith("e") and not word.endswith("le")))


def reading_ease(text: str) -> float:
    found = WORD.findall(text)
    sentences = [part for part in SENTENCE.split(text) if WORD.search(part)]
    return 206.835 - 1.015 * len(found) / len(sentences) - 84.6 * sum(map(syllables, found)) / len(found)


def main(arguments: Sequence[str]) -> None:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    texts = {path: path.read_text() for path in pages(root)}
    for path, text in texts.items():
        print(f"{words(text):6d}  {reading_ease(prose(text)):5.1f}  {path.relative_to(root)}")
    joined = "\n\n".join(prose(text) for text in texts.values())
    print(f"{sum(map(words, texts.values())):6d}  {reading_ease(joined):5.1f}  all")


if __name__ == "__main__":
    main(sys.argv[1:])
