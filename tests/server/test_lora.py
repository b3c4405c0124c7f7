"""LoRA adapters as clients see them: models of their own, which requests of every kind may name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.recovery import Loss, RecoverableRequest
from omni_cluster.models.registry import known_families
from omni_cluster.serve_local import listening, serving
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.adapters import write_adapter
from tests.configs import TINY_CONFIG
from tests.openai_api.forms import sound
from tests.server.realtime.talk import Talk, talk
from tests.server.speaker import Speaker

BASE = "preset:tiny"


class Remembering(Speaker):
    """Keeps which adapters it was asked for."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.asked: list[str] = []

    def check(self, request: OmniRequest) -> None:
        self.bound.check(request)

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        self.asked.append(request.adapter)
        async for event in super().stream(request, deadline):
            yield event


def config_of(tiny: Path, folder: Path) -> PipelineConfig:
    config = load_config(TINY_CONFIG, known_families=known_families())
    adapters = {name: str(write_adapter(folder / name, tiny)) for name in ("support", "an-org/legal")}
    thinker, *others = config.stages
    return config.model_copy(update={"stages": [thinker.model_copy(update={"lora_adapters": adapters}), *others]})


@asynccontextmanager
async def serving_adapters(tiny: Path, folder: Path) -> AsyncIterator[tuple[Remembering, str]]:
    speaker = Remembering(config_of(tiny, folder))
    with listening("127.0.0.1", 0) as listener:
        async with serving(speaker, listener) as server:
            yield speaker, server.url


@pytest.fixture
async def served(tiny: Path, tmp_path: Path) -> AsyncIterator[tuple[Remembering, httpx.AsyncClient]]:
    async with (
        serving_adapters(tiny, tmp_path) as (speaker, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield speaker, client


Served = tuple[Remembering, httpx.AsyncClient]


async def test_each_is_a_model_with_its_parent(served: Served) -> None:
    _, client = served
    listed = (await client.get("/v1/models")).json()["data"]
    told = [(each["id"], each.get("parent")) for each in listed]
    assert told == [(BASE, None), ("support", BASE), ("an-org/legal", BASE)]
    assert (await client.get("/v1/models/an-org/legal")).json() == listed[2]


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["text"]},
    "responses": {"input": "Hi"},
    "completions": {"prompt": "Hi"},
    "audio/speech": {"input": "Hi.", "response_format": "pcm"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_has_the_adapter_that_it_names(served: Served, path: str) -> None:
    speaker, client = served
    for model in ({"model": "support"}, {"model": "an-org/legal"}, {"model": BASE}, {}):
        answer = await client.post(f"/v1/{path}", json={**BODIES[path], **model})
        assert answer.status_code == 200, answer.text
    assert speaker.asked == ["support", "an-org/legal", "", ""]


async def test_a_transcription_has_the_adapter_that_it_names(served: Served) -> None:
    speaker, client = served
    for model in ("support", BASE):
        files = {"file": ("a.wav", sound(0.5), "audio/wav")}
        answer = await client.post("/v1/audio/transcriptions", files=files, data={"model": model})
        assert answer.status_code == 200, answer.text
    assert speaker.asked == ["support", ""]


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_is_told_all_names(served: Served, path: str) -> None:
    speaker, client = served
    answer = await client.post(f"/v1/{path}", json={**BODIES[path], "model": "suport"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == ('The model "suport" does not exist; use one of an-org/legal, preset:tiny, support.')
    assert speaker.asked == []


@pytest.mark.parametrize(("model", "adapter"), [("support", "support"), ("gpt-realtime", ""), (BASE, "")])
async def test_a_realtime_session_has_the_adapter_of_its_address(
    tiny: Path, tmp_path: Path, model: str, adapter: str
) -> None:
    async with serving_adapters(tiny, tmp_path) as (speaker, url), talk(url, model=model) as client:
        created = await client.next()
        assert created["session"]["model"] == (adapter or BASE)
        await said(client)
    assert speaker.asked == [adapter]


async def said(client: Talk) -> None:
    await client.say("Hello")
    await client.answer(output_modalities=["text"])


async def test_a_request_that_is_begun_again_keeps_its_adapter(tiny: Path, tmp_path: Path) -> None:
    bound = Speaker(config_of(tiny, tmp_path)).bound
    recoverable = RecoverableRequest(bound, OmniRequest("r", "Hello.", adapter="support"))
    recoverable.new(StageEvent("thinker", StageChunk(token_ids=(1, 2))))
    assert recoverable.may_begin_again(Loss("thinker", "a"), {})
    again = recoverable.next_request()
    assert (again.adapter, again.known["thinker"].token_ids) == ("support", (1, 2))


def test_an_adapter_that_is_not_configured_is_refused(tiny: Path, tmp_path: Path) -> None:
    bound = Speaker(config_of(tiny, tmp_path)).bound
    bound.check(OmniRequest("r", "Hello.", adapter="support"))
    with pytest.raises(RequestError, match=r"^adapter is 'other'; use support, an-org/legal\.$"):
        bound.check(OmniRequest("r", "Hello.", adapter="other"))
