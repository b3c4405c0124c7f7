"""What an answer may be made of."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

Modality = Literal["text", "audio", "image"]
MODALITIES: Final[tuple[Modality, ...]] = get_args(Modality)

_IN_WORDS: Final[Mapping[Modality, str]] = {"text": "text", "audio": "sound", "image": "pictures"}


def not_made(asked: Collection[str], made: Collection[str | None]) -> str | None:
    """What is wrong with the first of `asked`, beside text, that is not among `made`: for a sentence; None: nothing."""
    missing = next((each for each in MODALITIES[1:] if each in asked and each not in made), None)
    if missing is None:
        return None
    use = json.dumps([each for each in MODALITIES if each in made])
    return f"no stage here makes {_IN_WORDS[missing]}, use {use}"
