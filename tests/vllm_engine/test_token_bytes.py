from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from omni_cluster.vllm_engine.token_bytes import TokenBytes, byte_level


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> object:
    return AutoTokenizer.from_pretrained(tiny)


@pytest.mark.parametrize("text", ["Hello world.", "ünïcödé 語 👩‍🚀 \x00\x7f\u2028", "<|im_end|> as a mark"])
def test_bytes_of_tokens_joined_are_the_texts(tokenizer: object, text: str) -> None:
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    assert b"".join(map(token_bytes.of, ids)) == text.encode()


def test_each_byte_has_one_letter() -> None:
    assert sorted(byte_level().values()) == list(range(256))


def test_an_id_that_is_no_token_has_no_bytes(tokenizer: object) -> None:
    assert TokenBytes(tokenizer).of(100_000) == b""
