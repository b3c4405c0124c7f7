"""The playground's page and files: open to all, while what it asks of the API needs a key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omni_cluster.server.endpoints.playground import FOLDER, MEDIA_TYPES, NAMES
from tests.server.keyed import ONE, config_of
from tests.server.speaker import Face, face_of

pytestmark = pytest.mark.usefixtures("tiny")

PATHS = {"/": "index.html", **{f"/playground/{name}": name for name in sorted(NAMES)}}
NOT_THERE = (
    "/playground", "/playground/", "/playground/index.html", "/playground/nothing.js", "/playground/..%2fapp.py",
    "/playground/%2e%2e/app.py", "/index.html",
)  # fmt: skip


@pytest_asyncio.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    """The API with keys."""
    async with face_of(config_of(tmp_path, requests_per_minute=1_000.0)) as face:
        yield face


def policy(headers: dict[str, str]) -> dict[str, set[str]]:
    directives = [each.split() for each in headers["content-security-policy"].split(";")]
    return {name: set(sources) for name, *sources in directives}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_browser_gets_the_page_and_its_files_without_a_key(face: Face, method: str, path: str) -> None:
    answer = await face.client.request(method, path)
    file = FOLDER / PATHS[path]
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, MEDIA_TYPES[file.suffix])
    assert int(answer.headers["content-length"]) == file.stat().st_size
    assert answer.headers["x-content-type-options"] == "nosniff"
    if method == "GET":
        assert answer.content == file.read_bytes()


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_of_other_servers_is_loaded_and_nothing_inline_runs(face: Face, path: str) -> None:
    said = policy((await face.client.get(path)).headers)
    assert set().union(*said.values()) <= {"'self'", "'none'", "blob:"}
    assert said["default-src"] == {"'none'"} and said["script-src"] == said["connect-src"] == {"'self'"}
    assert said["frame-ancestors"] == {"'none'"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", *NOT_THERE])
async def test_all_else_needs_a_key(face: Face, path: str) -> None:
    assert (await face.client.get(path)).status_code == 401


@pytest.mark.parametrize("path", NOT_THERE)
async def test_a_path_that_is_no_file_of_the_page_is_none(face: Face, path: str) -> None:
    answer = await face.client.get(path, headers={"Authorization": f"Bearer {ONE}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_the_page_takes_nothing(face: Face) -> None:
    answer = await face.client.post("/", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_supported")


def test_the_page_names_no_other_server_and_each_file_is_named() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.iterdir()}
    addresses = {found for text in texts.values() for found in re.findall(r"(?:https?|wss?)://[^\s\"'`)]+", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, of which nothing is loaded
    everything = "\n".join(texts.values())
    assert set(texts) == {*NAMES, "index.html"} and [name for name in NAMES if name not in everything] == []


async def test_the_schema_has_the_api_alone(face: Face) -> None:
    schema = (await face.client.get("/openapi.json", headers={"Authorization": f"Bearer {ONE}"})).json()
    assert not [path for path in schema["paths"] if path == "/" or path.startswith("/playground")]
