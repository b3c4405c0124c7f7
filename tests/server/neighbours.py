"""Answers that must be the same beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.http_app import MODEL, HttpApp

LONG = "All that was said before. " * 45
"""More than one prefill chunk of the default configuration, which is 512 tokens."""


CHUNK = 512


def ask(app: HttpApp, text: str, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 24, **options}
    answer = app.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.5, "presence_penalty": 1.0},
    {"logprobs": True, "top_logprobs": 3},
    {"stage_sampling_params": {"thinker": {"temperature": 1.0, "top_k": 5, "min_p": 0.1}}},
)


def assert_same_beside_others(app: HttpApp, text: str, own: dict[str, Any]) -> None:
    seeded = {"temperature": 1.0, "seed": 1, "stage_sampling_params": {"thinker": own}}
    alone = ask(app, text, **seeded)
    assert text != LONG or alone["usage"]["prompt_tokens"] > CHUNK
    assert said(ask(app, text, **seeded | {"seed": 2})) != said(alone)
    with ThreadPoolExecutor(len(NEIGHBOURS) + 1) as pool:
        beside = [pool.submit(ask, app, LONG, **neighbour) for neighbour in NEIGHBOURS]
        again = pool.submit(ask, app, text, **seeded)
        assert said(again.result()) == said(alone)
        assert all(said(each.result()) for each in beside)
