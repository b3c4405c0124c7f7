"""What an operator sees of the default application: Ray's own tools, and what Serve says of its calls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml

from tests.http_app import nothing_is_left
from tests.served.app import BASE_URL, STAGES, ServedApp, until

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"
DEPLOYMENTS = (*STAGES, "ingress")
TOOLS = Path(sys.executable).parent
ENOUGH_S = 120


def spoken(codes: int, **options: Any) -> dict[str, Any]:
    exact = {"thinker": {"max_tokens": 4}, "talker": {"max_tokens": codes, "min_tokens": codes}}
    body = {"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
    return body | {"audio": {"voice": "Ethan", "format": "wav"}, "stage_sampling_params": exact, **options}


# ------------------------------------------------------------ Serve's own log


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_whole_answer_is_ok_in_serve_s_log(served: ServedApp, stream: bool) -> None:
    name = f"whole-{stream}"
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60) as client:
        answer = await client.post(CHAT, json=spoken(24, stream=stream), headers={"x-request-id": name})
    assert answer.status_code == 200
    await until(lambda: all_have_said(name), "each stage's call is in Serve's log")
    assert [said_of(name, stage) for stage in STAGES] == [["OK"]] * len(STAGES)


async def test_a_call_whose_client_left_is_cancelled_there(served: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60) as client:
        options = {"json": spoken(2000, stream=True), "headers": {"x-request-id": "left"}}
        async with client.stream("POST", CHAT, **options) as answer:
            await anext(answer.aiter_lines())
    await until(lambda: all_have_said("left"), "each stage's call is in Serve's log")
    assert [said_of("left", stage) for stage in STAGES] == [["CANCELLED"]] * len(STAGES)
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


async def all_have_said(name: str) -> bool:
    return all(said_of(name, stage) for stage in STAGES)


def said_of(name: str, stage: str) -> list[str]:
    """What Serve's log has of the request's call of the stage."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    text = "".join(file.read_text() for file in logs.glob(f"replica_default_{stage}_*.log"))
    return re.findall(rf"{name} .*CALL generate (\w+)", text)


# ------------------------------------------------------------ Ray's tools


def said_by(*command: str) -> str:
    """As docs/operate/operations.md has it: from another terminal, which knows of no Ray."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_AUTH_MODE"] = "token"
    tool = str(TOOLS / command[0])
    done = subprocess.run([tool, *command[1:]], env=environment, capture_output=True, text=True, timeout=ENOUGH_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


async def test_serve_says_how_the_application_is(served: ServedApp) -> None:
    status = yaml.safe_load(await asyncio.to_thread(said_by, "serve", "status"))
    deployments = status["applications"]["default"]["deployments"]
    assert {name: each["status"] for name, each in deployments.items()} == dict.fromkeys(DEPLOYMENTS, "HEALTHY")


async def test_ray_lists_the_replicas(served: ServedApp) -> None:
    listed = await asyncio.to_thread(said_by, "ray", "list", "actors", "--format", "json", "--limit", "1000")
    names = {actor["class_name"] for actor in json.loads(listed) if actor["state"] == "ALIVE"}
    assert {f"ServeReplica:default:{name}" for name in DEPLOYMENTS} <= names


async def test_the_dashboard_takes_the_token_that_ray_prints(served: ServedApp) -> None:
    token = (await asyncio.to_thread(said_by, "ray", "get-auth-token")).split()[-1]
    async with httpx.AsyncClient(base_url=served.dashboard_url, timeout=ENOUGH_S) as client:
        asked = [client.get("/api/serve/applications/", headers=headers) for headers in ({}, bearer(token))]
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [401, 200]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
