"""Which part of an answer's text was heard when its sound was stopped."""

from __future__ import annotations

from typing import Final

USUAL_CHARS_PER_S: Final = 15.0
"""Of English speech; an answer that has ended tells it for the next one."""

ROUNDING: Final = 1e-6
"""Of a character: seconds are added up piece by piece, and at the sound's end the last one was heard, too."""


def heard_text(text: str, heard_s: float, chars_per_s: float) -> str:
    """The beginning of the text that so many seconds of its sound had, cut behind a word: rather less than more.

    The talker aligns no text with its sound, so the text is taken as spread evenly.
    """
    most = int(heard_s * chars_per_s + ROUNDING)
    if most >= len(text):
        return text
    cut = text[:most]
    if most and not (cut[-1].isspace() or text[most].isspace()):
        cut = cut[: max(cut.rfind(each) for each in " \n\t") + 1]
    return cut.rstrip()
