"""The bytes of tokens: of a byte-level vocabulary, whose tokens may be parts of a character."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

MAX_KNOWN = 65_536
"""Tokens whose bytes are remembered."""


class TokenBytes:
    """Bytes by token id, of a fast tokenizer of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
        self._bytes_of = byte_level()
        self.of = lru_cache(MAX_KNOWN)(self._of)

    def _of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        written = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        return bytes(self._bytes_of[letter] for letter in written)


def byte_level() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: OpenAI's table for GPT-2.

    Letters that print stand for themselves; those from U+0100 on stand for the other bytes, in their order.
    """
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}
