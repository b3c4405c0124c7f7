"""Sampling as a new user tries it: a temperature, a seed, a long prompt, and other clients beside."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_app import MODEL
from tests.server.local import LocalApp
from tests.server.neighbours import LONG, assert_same_beside_others


@pytest.mark.parametrize("text", ["Hello.", LONG], ids=["short", "long"])
@pytest.mark.parametrize("own", [{}, {"top_k": 30, "repetition_penalty": 1.2}], ids=["all", "few"])
def test_a_seeded_answer_is_the_same_alone_and_beside_others(local: LocalApp, text: str, own: dict[str, Any]) -> None:
    assert_same_beside_others(local, text, own)


def test_an_id_that_the_model_has_not_is_told_in_one_sentence(local: LocalApp) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    sampling = {"stage_sampling_params": {"thinker": {"stop_token_ids": [2**31 - 1]}}}
    answer = local.client.post("/v1/chat/completions", json=body | sampling)
    assert answer.status_code == 400
    error, field = answer.json()["error"], "stage_sampling_params.thinker.stop_token_ids"
    assert error["param"] == field
    assert error["message"].startswith(f"{field} has the token 2147483647, but the model's are 0 to ")
