"""What is served, by whichever path a client asks it; and HEAD, which is GET without the body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.registry import known_families
from omni_cluster.server.endpoints.models import ModelsEndpoint
from tests.configs import TINY_CONFIG
from tests.server.speaker import speaking

NAME = "an-org/a-model:with.a_tag"


@pytest.fixture
async def client(tiny: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of an API whose model has a name of the hub's kind."""
    bound = bind(load_config(TINY_CONFIG, known_families=known_families()))
    api = FastAPI()
    ModelsEndpoint(replace(bound, config=bound.config.model_copy(update={"model": NAME}))).add_to(api)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://face") as client:
        yield client


@pytest.mark.parametrize("path", [NAME, quote(NAME, safe=""), quote(NAME)])
async def test_a_model_is_found_by_its_name_encoded_or_not(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(f"/v1/models/{path}")
    assert (answer.status_code, answer.json()["id"]) == (200, NAME)


async def test_a_slash_at_the_end_asks_for_all(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


# ------------------------------------------------------------ HEAD


@pytest.fixture
async def served(tiny: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        speaking(load_config(TINY_CONFIG, known_families=known_families())) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/audio/voices"])
async def test_head_is_answered_as_get_without_the_body(served: httpx.AsyncClient, path: str) -> None:
    got, headed = await served.get(path), await served.head(path)
    assert (headed.status_code, headed.content) == (200, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]
    assert int(headed.headers["content-length"]) > 0


async def test_head_of_what_is_not_there_is_404_and_of_what_is_posted_405(served: httpx.AsyncClient) -> None:
    paths = ("/v1/models/other", "/v2", "/v1/chat/completions")
    assert [(await served.head(path)).status_code for path in paths] == [404, 404, 405]


async def test_health_has_the_word_that_clients_look_for(served: httpx.AsyncClient) -> None:
    assert (await served.get("/health")).json() == {"status": "healthy"}
