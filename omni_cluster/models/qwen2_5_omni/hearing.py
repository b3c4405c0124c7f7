"""The prompts by which the family writes down what is said, as its authors publish them."""

from __future__ import annotations

from typing import Any, Final

from omni_cluster.models.family import Hearing
from omni_cluster.models.hearing import question_of

RECOGNITION: Final = "You are a speech recognition model."
TRANSLATION: Final = "You are a speech translation model."


def messages_of(hearing: Hearing) -> list[dict[str, Any]]:
    """A conversation with one audio part, for the chat template."""
    system = RECOGNITION if hearing.into is None else TRANSLATION
    return [{"role": "system", "content": [{"type": "text", "text": system}]}, question_of(hearing)]
