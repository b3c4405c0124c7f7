"""Requests made from `/openapi.json`: whatever comes, the answer is one that the document tells of."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.engine.stages import until
from tests.server.local import LocalApp

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TEXT_TOKENS = 2
CODES = 24
SPOKEN_CHARS = 40
EXAMPLES = {
    "/v1/chat/completions": 60,
    "/v1/audio/speech": 16,
    "/v1/completions": 30,
    "/v1/responses": 40,
    "/detokenize": 20,
}
"""Fewer of speech: what is taken of it has no bound on its length but the talker's own."""
FEW = 1 / 3
"""Of them, in `make test`."""


REQUIRED = {"model", "messages", "input", "prompt", "tokens"}
OPTIONAL = ("temperature", "top_p", "seed", "stop", "n", "audio", "modalities", "stream", "tools", "logprobs", "voice")
"""Fields of which a request that follows the document has some: with all of them hardly one can be answered, for each
may ask for what this model lacks, such as a voice."""


@pytest.fixture(scope="module")
def document(local: LocalApp) -> Any:
    return schemathesis.openapi.from_url(f"{local.url}/openapi.json")


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        (GenerationMode.POSITIVE, FEW),
        *(pytest.param(mode, 1, marks=pytest.mark.full) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)),
    ],
    ids=["few", "positive", "negative"],
)
@pytest.mark.parametrize("path", EXAMPLES)
def test_whatever_comes_gets_an_answer_that_the_document_tells_of(
    document: Any, path: str, mode: GenerationMode, share: float
) -> None:
    statuses: list[int] = []

    @given(case=document[path]["POST"].as_strategy(generation_mode=mode), kept=st.sets(st.sampled_from(OPTIONAL)))
    @settings(
        max_examples=int(share * EXAMPLES[path]),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answered(case: Case, kept: set[str]) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = {name: value for name, value in case.body.items() if name in REQUIRED | kept}
        make_cheap(case)
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    answered()
    assert set(statuses) <= {200, *range(400, 500)}
    # What follows the document is taken now and then, and what does not is refused.
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE)


def make_cheap(case: Case) -> None:
    """What may be taken takes a moment: few tokens. Nothing that is refused is repaired."""
    body = case.body
    if not isinstance(body, dict):
        return
    if case.path == "/v1/responses":
        body.setdefault("max_output_tokens", TEXT_TOKENS)
    elif isinstance(body.get("input"), str) and len(body["input"]) <= 4096:
        body["input"] = body["input"][:SPOKEN_CHARS]
    elif "prompt" in body and isinstance(body.get("n", 1), int):
        body |= {"max_tokens": TEXT_TOKENS} if "max_tokens" not in body else {}
        body |= {"n": min(2, body["n"])} if isinstance(body.get("n"), int) else {}
    elif "messages" in body and not {"max_tokens", "max_completion_tokens", "min_tokens"} & set(body):
        body["max_tokens"] = TEXT_TOKENS
        body.setdefault("stage_sampling_params", {"talker": {"max_tokens": CODES}})


async def test_nothing_of_them_is_left(local: LocalApp) -> None:
    await until(local.nothing_is_left)
