from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from transformers import AutoTokenizer

from omni_cluster.types.errors import RequestError
from omni_cluster.vllm_engine.grammar import valid_strings, with_grammar


@pytest.mark.parametrize(
    "untouched",
    [
        {},
        {"type": "string"},
        {"type": "string", "pattern": "a", "maxLength": 3},
        {"type": "array", "maxLength": 3},
        {"properties": {"type": {"const": "string"}, "maxLength": {"type": "integer"}}},
    ],
)
def test_other_schemas_stay_as_they_are(untouched: dict[str, Any]) -> None:
    assert valid_strings(untouched) == untouched


def test_lengths_anywhere_become_patterns() -> None:
    bounded = {"type": "string", "minLength": 2, "title": "T"}
    made = valid_strings({"anyOf": [{"properties": {"a": bounded}}]})["anyOf"][0]["properties"]["a"]
    assert made == {"type": "string", "title": "T", "pattern": made["pattern"]} and made["pattern"].endswith("{2,}$")


@pytest.mark.parametrize("seed", range(5))
def test_a_string_of_bounded_length_is_valid_json(tiny: Path, seed: int) -> None:
    """Whatever a model says of what is allowed."""
    schema = json.dumps(valid_strings({"type": "string", "minLength": 3, "maxLength": 9}))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema(schema))
    said, chance = bytearray(), random.Random(seed)
    while not matcher.is_terminated():
        mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = [i for i in range(info.vocab_size) if mask[0][i // 32].to(torch.int64) >> (i % 32) & 1]
        token = chance.choice(allowed)
        said += b"" if token in info.stop_token_ids else info.decoded_vocab[token]
        assert matcher.accept_token(token)
    assert 3 <= len(json.loads(said.decode())) <= 9


def test_parameters_without_a_structure_stay_as_they_are() -> None:
    chosen = {"temperature": 1.0, "structured_outputs": None}
    assert with_grammar(chosen, "thinker") is chosen


def test_what_goes_on_behind_a_grammar_s_end_is_refused() -> None:
    with pytest.raises(RequestError, match="ignore_eos and structured_outputs of stage thinker are both given"):
        with_grammar({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "thinker")
