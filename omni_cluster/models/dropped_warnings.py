"""Warnings of libraries that mean nothing to an operator, dropped by their logger and their words; errors never are."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Final

OF_CHECKPOINTS: Final[Mapping[str, Sequence[str]]] = {
    # A part of a model may have a vocabulary of its own, and carries the ids of the text's tokens too.
    "transformers.configuration_utils": ("must be `None` or an integer within the vocabulary",),
    # A checkpoint may say more of its rotary embeddings than transformers' class of that part reads.
    "transformers.modeling_rope_utils": ("Unrecognized keys in `rope_parameters`",),
}
"""Where the configuration of a checkpoint is read or written."""


def drop_warnings(logged: Mapping[str, Sequence[str]]) -> None:
    """Words by the logger's name, for this process and its forks; may be called again."""
    for name, words in logged.items():
        logging.getLogger(name).addFilter(_without(tuple(words)))


class _Without(logging.Filter):
    """Lets pass what has none of these words, and all errors."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        said = record.getMessage()
        return not any(words in said for words in self._words)


@functools.cache
def _without(words: tuple[str, ...]) -> _Without:
    return _Without(words)
