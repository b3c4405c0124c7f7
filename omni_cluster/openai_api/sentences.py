"""Where sentences end in a text that comes in pieces."""

# ruff: noqa: RUF001 - marks of other scripts are meant
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

Granularity = Literal["none", "sentence", "clause"]

_QUOTES: Final = "”’»」』）》"
"""Closing ones, which a sentence begins with only where it was cut before them."""
_CLOSERS: Final = rf"[\"')\]*_{_QUOTES}]*+"
_LINE: Final = r"\n"
# A mark that is also written within words ends a sentence only before white space.
_SENTENCE: Final = rf"[.!?…]++{_CLOSERS}\s|[。！？।॥؟]++{_CLOSERS}|{_LINE}"
_CLAUSE: Final = rf"[.!?…,;:]++{_CLOSERS}\s|[。！？।॥؟，；：、،؛]++{_CLOSERS}|{_LINE}"
_ENDS: Final[Mapping[Granularity, re.Pattern[str] | None]] = {
    "none": None,
    "sentence": re.compile(_SENTENCE),
    "clause": re.compile(_CLAUSE),
}
_SHORTENED: Final = re.compile(
    r"^\s*\d+\.\s$|(?:^|[\s(\"'])(?:[A-ZÀ-Þ]|[^\W\d_]\.[^\W\d_]|Dr|Mr|Mrs|Ms|Prof|St|Sr|Jr|vs|approx|Fig|Nr|ca|bzw)\.\s$"
)
"""A number of a list, an initial, or an abbreviation: what it belongs to follows."""


class SentenceSplitter:
    """Takes a text piece by piece; gives each sentence, or clause, once its end is there. None: the text as a whole.

    What has neither a letter nor a digit is no sentence: it goes with the next one.
    """

    def __init__(self, granularity: Granularity) -> None:
        self._end = _ENDS[granularity]
        self.rest = ""
        """What has no end yet."""

    def push(self, text: str) -> list[str]:
        self.rest += text
        found: list[str] = []
        start = 0
        for end in self._end.finditer(self.rest) if self._end is not None else ():
            piece = self.rest[start : end.end()]
            if not _SHORTENED.search(piece) and (sentence := _stripped(piece)):
                found.append(sentence)
                start = end.end()
        self.rest = self.rest[start:].lstrip()
        return found

    def flush(self) -> list[str]:
        """The last sentence, with or without an end."""
        rest, self.rest = _stripped(self.rest), ""
        return [rest] if rest else []


def _stripped(piece: str) -> str:
    """Nothing, of what cannot be spoken."""
    sentence = piece.strip().lstrip(_QUOTES).lstrip()
    return sentence if any(character.isalnum() for character in sentence) else ""
