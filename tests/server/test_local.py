"""The whole API over a pipeline in this process, through a socket: no Ray takes part."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from omni_cluster.engine.build import make_stage
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.serve_local import AddressTaken, listening, run_server, serving
from omni_cluster.server.app import HttpServer
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from tests.engine.stages import MAX_TOKENS, PATIENCE_S, until, until_counts
from tests.reference import media

SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}, "seed": 3}
QUESTION = [{"role": "user", "content": "Tell me."}]
STAGES = ("thinker", "talker", "code2wav")
RAW = 32_768


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(pipeline: AsyncOmniLLM) -> AsyncIterator[httpx.AsyncClient]:
    with listening("127.0.0.1", 0) as listener:
        async with serving(pipeline, listener) as server, httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wanted(pipeline: AsyncOmniLLM) -> OmniRequestOutput:
    """What the pipeline itself answers to `QUESTION`."""
    return await pipeline.generate(OmniRequest("asked-directly", pipeline.render(QUESTION), seed=3))


def chat(pipeline: AsyncOmniLLM, **options: Any) -> dict[str, Any]:
    return {"model": pipeline.config.model, "messages": QUESTION, **options}


def samples(base64_text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(base64_text), "<i2") / RAW


async def counted(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Every sample of a scrape from now on, by its name and the values of its labels but the replica's."""
    asked_s = time.time()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = samples_of((await client.get("/metrics")).text)
            if found[("omni_cluster_scrape_timestamp_seconds",)] > asked_s:
                return found
            await asyncio.sleep(0.01)


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "replica")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ended(samples: dict[tuple[str, ...], float], stage: str) -> float:
    return sum(samples["omni_cluster_stage_requests_total", outcome, stage] for outcome in ("finished", "cancelled"))


async def test_it_says_that_it_lives_and_what_it_serves(client: httpx.AsyncClient, pipeline: AsyncOmniLLM) -> None:
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "replicas": dict.fromkeys(STAGES, 1)})
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["id"] == pipeline.config.model and model["voices"] == list(pipeline.voices)
    assert (await client.get(f"/v1/models/{model['id']}")).json()["id"] == model["id"]
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
    voices = (await client.get("/v1/audio/voices")).json()
    assert {voice["id"]: voice["name"] for voice in voices["voices"]} == {name: name for name in pipeline.voices}
    assert voices["names"] == list(pipeline.voices) and voices["aliases"]["alloy"] == "Chelsie"


async def test_an_engine_that_does_not_run_is_not_ready(pipeline: AsyncOmniLLM) -> None:
    stage = next(stage for stage in pipeline.config.stages if stage.model_stage == "code2wav")
    gone = AsyncOmniLLM(pipeline.config)
    gone._stages = pipeline._stages | {"code2wav": make_stage(stage, pipeline.bound)}  # never started
    server = HttpServer(gone)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://face") as client:
        answer = await client.get("/ready")
    await server.close()
    replicas = {"thinker": 1, "talker": 1, "code2wav": 0}
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "replicas": replicas})


async def test_a_whole_answer_is_the_pipeline_s(
    client: httpx.AsyncClient, pipeline: AsyncOmniLLM, wanted: OmniRequestOutput
) -> None:
    answer = await client.post(
        "/v1/chat/completions", json=chat(pipeline, **SPOKEN), headers={"x-request-id": "the-clients-own"}
    )
    assert answer.headers.get_list("x-request-id") == ["the-clients-own"]  # no proxy adds it here
    body = answer.json()
    message = body["choices"][0]["message"]
    assert message["content"] == wanted.text and wanted.audio is not None
    np.testing.assert_allclose(samples(message["audio"]["data"]), wanted.audio.samples, atol=2 / RAW)
    assert body["usage"]["completion_tokens"] == len(wanted.token_ids) + wanted.codec_tokens
    assert (message["audio"]["voice"], answer.headers["x-omni-voice"]) == ("Chelsie", "Chelsie")
    assert set(body["omni"]["stages"]) == set(STAGES)


async def test_a_streamed_answer_says_the_same(
    client: httpx.AsyncClient, pipeline: AsyncOmniLLM, wanted: OmniRequestOutput
) -> None:
    body = chat(pipeline, **SPOKEN, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == wanted.text
    sound = "".join(delta.get("audio", {}).get("data", "") for delta in deltas)
    assert wanted.audio is not None and samples(sound).size == wanted.audio.samples.size


async def test_a_later_turn_with_sound_reads_what_the_one_before_computed(
    client: httpx.AsyncClient, pipeline: AsyncOmniLLM
) -> None:
    async def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = chat(pipeline, **SPOKEN) | {"messages": messages}
        answer = await client.post("/v1/chat/completions", json=body)
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    async def cached() -> float:
        return (await counted(client))["omni_cluster_stage_cached_tokens_total", "thinker"]

    turns = [{"role": "user", "content": "Tell me all about it. " * 12}]
    turns += [{"role": "assistant", "content": (await said(turns))["content"]}, *QUESTION]
    before = await cached()
    later = await said(turns)
    assert await cached() == before + 128  # a block on a CPU, where the configuration does not say it
    uncached = {"thinker": {"skip_reading_prefix_cache": True}}
    computed = await pipeline.generate(OmniRequest("uncached", pipeline.render(turns), seed=3, sampling=uncached))
    assert later["content"] == computed.text and computed.audio is not None
    np.testing.assert_allclose(samples(later["audio"]["data"]), computed.audio.samples, atol=2 / RAW)


async def test_media_are_decoded_and_seen(client: httpx.AsyncClient, pipeline: AsyncOmniLLM) -> None:
    file = io.BytesIO()
    media("image")[1][0].save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    with_image = chat(pipeline, modalities=["text"]) | {"messages": [{"role": "user", "content": content}]}
    usage = (await client.post("/v1/chat/completions", json=with_image)).json()["usage"]
    assert usage["prompt_tokens"] > 40 and usage["completion_tokens"] == MAX_TOKENS


async def test_a_text_is_spoken(client: httpx.AsyncClient, pipeline: AsyncOmniLLM) -> None:
    body = {"model": pipeline.config.model, "input": "Hello there.", "voice": "Ethan", "response_format": "pcm"}
    whole = await client.post("/v1/audio/speech", json=body | {"seed": 4})
    assert whole.headers["content-type"].startswith("audio/") and len(whole.content) > 960
    refused = await client.post("/v1/audio/speech", json=body | {"voice": "nobody"})
    assert refused.status_code == 400 and "nobody" in refused.json()["error"]["message"]


async def test_what_a_stage_refuses_is_the_client_s_fault(client: httpx.AsyncClient, pipeline: AsyncOmniLLM) -> None:
    long = chat(pipeline) | {"messages": [{"role": "user", "content": "word " * 2000}]}
    answer = await client.post("/v1/chat/completions", json=long)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_is_made_is_counted_and_who_leaves_ends_the_request(
    client: httpx.AsyncClient, pipeline: AsyncOmniLLM
) -> None:
    before = await counted(client)
    lengths = [{"max_tokens": 100, "ignore_eos": True}, {"max_tokens": 900, "ignore_eos": True}, None]
    endless = chat(pipeline, **SPOKEN, stream=True, sampling_params_list=lengths)
    async with client.stream("POST", "/v1/chat/completions", json=endless) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()  # named, for the connection is closed with it
        await anext(lines)
        running = await counted(client)
    for stage in STAGES:
        assert running["omni_cluster_stage_open_outboxes", stage] == 1
    for engine in pipeline._stages.values():
        await until_counts(engine, running=0, waiting=0)

    async def has_ended() -> bool:
        after = await counted(client)
        left = ("omni_cluster_ingress_requests_total", "/v1/chat/completions", "499")
        return after.get(left, 0) == before.get(left, 0) + 1

    await until(has_ended)
    after = await counted(client)
    assert after["omni_cluster_stage_tokens_total", "thinker"] > before["omni_cluster_stage_tokens_total", "thinker"]
    for stage in STAGES:
        assert after["omni_cluster_stage_open_outboxes", stage] == 0
        assert ended(after, stage) == ended(before, stage) + 1
    last = ("omni_cluster_stage_requests_total", "cancelled", STAGES[-1])
    assert after[last] == before[last] + 1  # the others may have been done


def test_an_address_that_is_taken_is_one_sentence_before_any_engine_starts() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"127\.0\.0\.1 port {port} \(Address already in use\); choose"):
            run_server(None, "127.0.0.1", port)
