"""What runs while an ingress dies, while the application is deployed anew, and when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from openai import AsyncOpenAI
from ray import serve

from tests.http_app import nothing_is_left
from tests.processes import command_line, running_after, shared_memory_of
from tests.served.app import BASE_URL, PATIENCE_S, ROOT, STAGES, ServedApp, until
from tests.served.deployed import run_serve
from tests.served.replaced import CHAT, REPLACED_S, body, process_ids

pytestmark = pytest.mark.full

LONG = 2000
"""Codes of an answer that takes longer than the grace where eight are asked for at once: 20 s for one on two cores."""
MIDDLE = 1000
"""Of an answer that cannot end before a test has seen it in all stages."""
SHORT = 48
END_S = 240


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for `serve deploy`: what `serve build` makes of the default, and a thinker alone by its arguments."""
    path = tmp_path_factory.mktemp("serve") / "two.yaml"
    run_serve("build", "deployments:default", "-o", str(path))
    built = yaml.safe_load(path.read_text())
    del built["http_options"]  # those of the Serve that runs
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text())
    config["stages"] = config["stages"][:1]
    (default,) = built["applications"]
    default["name"] = "default"
    beside = {"name": "text", "route_prefix": "/text", "import_path": "deployments:app", "args": {"config": config}}
    path.write_text(yaml.safe_dump(built | {"applications": [default, beside]}))
    return path


@dataclass
class Stream:
    """A streamed answer with sound, as its client sees it."""

    codes: int
    has_sound: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[str] = field(default_factory=list)

    async def read(self) -> None:
        asks, client = body(16, self.codes, stream=True), httpx.AsyncClient(base_url=BASE_URL, timeout=END_S)
        async with client, client.stream("POST", CHAT, json=asks) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self.events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                if '"audio"' in line:
                    self.has_sound.set()


@contextlib.asynccontextmanager
async def reading(*streams: Stream) -> AsyncIterator[list[asyncio.Task[None]]]:
    """All of them have sound when it opens."""
    tasks = [asyncio.create_task(stream.read()) for stream in streams]
    try:
        async with asyncio.timeout(END_S):
            for stream, task in zip(streams, tasks, strict=True):
                sounds = asyncio.create_task(stream.has_sound.wait())
                await asyncio.wait({sounds, task}, return_when=asyncio.FIRST_COMPLETED)
                assert sounds.done(), f"{task} ended without sound"
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


def ingress_pid(app: ServedApp) -> int:
    """Of the one that runs."""
    (found,) = [
        process.pid
        for process in psutil.Process(app.process.pid).children(recursive=True)
        if "ServeReplica:default:ingress" in command_line(process)
    ]
    return found


async def test_an_ingress_that_is_killed_leaves_nothing_and_sdks_ask_again(ended: ServedApp) -> None:
    asks = body(8, MIDDLE)
    async with AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=20, timeout=END_S) as client:
        stream = Stream(LONG)
        async with reading(stream) as (task,):
            whole = asyncio.create_task(client.post("/chat/completions", cast_to=httpx.Response, body=asks))

            async def are_at_work() -> bool:
                return all(status["open_outboxes"] == 2 for status in await ended.statuses())

            await until(are_at_work, "both requests are in all stages")
            os.kill(ingress_pid(ended), signal.SIGKILL)
            with pytest.raises(httpx.TransportError):  # what OpenAI's clients call APIConnectionError
                await task
        assert stream.events[-1] != "[DONE]"
        answer = await asyncio.wait_for(whole, END_S)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["audio"]["data"]
    await until(lambda: nothing_is_left(ended), "all stages let go of both requests")


@pytest.mark.timeout(900)
async def test_a_stream_outlives_the_replicas_that_serve_deploy_replaces(ended: ServedApp, file: Path) -> None:
    before, stream = await process_ids(ended), Stream(LONG)
    async with reading(stream) as (task,):
        await asyncio.to_thread(run_serve, "deploy", "-a", ended.dashboard_url, str(file))

        async def goes() -> bool:
            assert (await asyncio.to_thread(ended.client.get, "/ready")).status_code == 200
            deployments = serve.status().applications["default"].deployments  # none while the application is built
            return "talker" in deployments and "STOPPING" in deployments["talker"].replica_states

        await until(goes, "the old talker is told to go")
        assert not task.done()
        await asyncio.wait_for(task, END_S)
    assert stream.events[-1] == "[DONE]"

    async def both_run() -> bool:
        return {app.status.value for app in serve.status().applications.values()} == {"RUNNING"}

    await until(both_run, "both applications run", REPLACED_S)
    assert not set((await process_ids(ended)).values()) & set(before.values())
    again = Stream(SHORT)
    async with reading(again) as (task,):
        await asyncio.wait_for(task, END_S)
    assert again.events[-1] == "[DONE]"


async def test_the_applications_of_one_file_answer_beside_each_other(ended: ServedApp) -> None:
    asks = {"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    texts = set()
    for prefix in ("", "/text"):
        assert ended.client.get(f"{prefix}/ready").status_code == 200
        answer = ended.client.post(prefix + CHAT, json=asks)
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1
    spoken = ended.client.post(f"/text{CHAT}", json=asks | {"modalities": ["text", "audio"]})
    assert spoken.status_code == 400, spoken.text


@pytest.mark.timeout(900)
async def test_streams_may_end_after_sigterm_or_are_told(ended: ServedApp) -> None:
    ended.close()  # or this process would be ended with the cluster
    started = psutil.Process(ended.process.pid).children(recursive=True)
    shared = shared_memory_of(started)
    short, *long = streams = Stream(SHORT), *(Stream(LONG) for _ in range(8))
    async with reading(*streams) as tasks:
        ended.process.send_signal(signal.SIGTERM)
        ends = asyncio.create_task(asyncio.to_thread(ended.process.communicate, timeout=END_S))
        await until(turns_away, "new requests are turned away")
        await asyncio.wait_for(asyncio.gather(*tasks), END_S)
    assert short.events[-1] == "[DONE]"
    for each in long:
        assert json.loads(each.events[-1])["error"]["code"] == "server_closing", each.events[-1]
    await ends
    assert ended.process.returncode == 0
    assert len(started) > len(STAGES)
    stayed = await asyncio.to_thread(running_after, started, PATIENCE_S)
    assert not stayed, f"{stayed} stayed"
    assert not any(path.exists() for path in shared), shared


async def turns_away() -> bool:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        answer = await client.post(CHAT, json=body(4, 24))
    return answer.status_code == 503 and answer.json()["error"]["code"] == "server_closing"
