"""Tokens are bytes; one more ends a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

END = 256
END_MARK = "<end>"
VOCAB_SIZE = 257


@dataclass(frozen=True)
class Mark:
    """A token that is no text."""

    content: str
    special: bool = True


@dataclass(frozen=True)
class Encoding:
    """The ids of one text."""

    ids: list[int]


class ByteTokenizer:
    """A tokenizer as `PromptMaker` takes it, which is its own backend."""

    encode_special_tokens = False

    @property
    def added_tokens_decoder(self) -> dict[int, Mark]:
        return {END: Mark(END_MARK)}

    @property
    def backend_tokenizer(self) -> ByteTokenizer:
        return self

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        return [Encoding(list(text.encode())) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(each for each in ids if each != END).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str:
        return END_MARK if token_id == END else bytes([token_id]).decode("latin-1")
