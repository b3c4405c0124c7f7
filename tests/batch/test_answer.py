"""What a row of answers holds, in a table and as a sample."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from omni_cluster.batch.answer import SCHEMA, Answer, sample_of, table_of
from omni_cluster.batch.errors import BatchError
from omni_cluster.batch.limits import BatchLimits

USAGE = {"prompt_tokens": 3, "completion_tokens": 32, "completion_tokens_details": {"audio_tokens": 30}}


def completion(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE}


def test_an_answer_has_text_sound_and_usage() -> None:
    sound = base64.b64encode(b"RIFF").decode()
    answer = Answer.of("a", completion({"content": "Hi", "audio": {"data": sound}}))
    assert (answer.text, answer.sound, answer.finish_reason) == ("Hi", b"RIFF", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.audio_tokens) == (3, 32, 30)
    assert answer.error is None and answer.error_code is None


def test_tables_of_answers_and_of_errors_have_the_same_columns() -> None:
    said = table_of([Answer.of("a", completion({"content": "Hi"}))])
    failed = table_of([Answer(id="b", error="It is bad.", error_code="bad_row")])
    assert said.schema == failed.schema == table_of([]).schema == SCHEMA
    assert failed.to_pylist()[0] == dict.fromkeys(SCHEMA.names) | {
        "id": "b",
        "error": "It is bad.",
        "error_code": "bad_row",
    }


def test_a_sample_s_key_has_no_dot_and_the_json_all_but_text_and_sound() -> None:
    (row,) = table_of([Answer(id="a/b.c", text="Hi", sound=b"RIFF", prompt_tokens=3)]).to_pylist()
    sample = sample_of(row)
    assert sample["__key__"] == "a%2Fb%2Ec" and sample["id"] == "a/b.c"
    assert (sample["txt"], sample["wav"]) == ("Hi", b"RIFF")
    assert json.loads(sample["json"])["prompt_tokens"] == 3 and "sound" not in json.loads(sample["json"])


def test_blocks_at_once_fill_all_places_while_one_block_ends() -> None:
    assert BatchLimits(rows_at_once=32, rows_a_block=8).blocks_at_once == 5
    assert BatchLimits(rows_at_once=1, rows_a_block=8).blocks_at_once == 2
    with pytest.raises(BatchError, match="rows_at_once is 0; use a number above 0"):
        BatchLimits(rows_at_once=0)
