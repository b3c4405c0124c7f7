"""A replica of any stage dies at any moment of a stream: the client gets the answer that it would have had."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import yaml
from ray import serve
from ray.serve._private.common import DeploymentID

from omni_cluster.cluster.serve_private import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from omni_cluster.openai_api.audio import wav_bytes
from tests.chaos.soak import Plan, nothing_is_left, soaked
from tests.http_app import MODEL, PCM16_STEP, STREAM_TOLERANCE
from tests.processes import engine_of, family, running_after
from tests.reference import media
from tests.served.app import BASE_URL, ROOT, STAGES, ServedApp, scrape, serve_run, until
from tests.server.samples import totals

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
REPLACED_S = 300
ENDED_S = 10
"""Until the processes of a replica that was killed are gone: a moment, on a quiet host."""
TEXT_TOKENS, CODES = 500, 1200
"""Of an answer in the midst of which something is killed: each stage works for seconds once its moment has come."""
ASK_S = 0.25
READY_S = 2.0
"""Whoever watches a host waits so long for `/ready`."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two replicas of each stage behind one ingress; one of the thinkers stands by."""
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml").read_text())
    config["stages"][0] |= {"num_replicas": 1, "standby_replicas": 1}
    config["stages"][2]["num_replicas"] = 2
    config["ingress_replicas"] = 1
    path = tmp_path_factory.mktemp("config") / "pairs.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app


def body(content: Any = "Tell me a story.", **fields: Any) -> dict[str, Any]:
    lengths = {"thinker": TEXT_TOKENS, "talker": CODES}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "seed": 7,
        "stage_sampling_params": {
            name: {"max_tokens": n, "min_tokens": n, "temperature": 0.8, "top_k": 20} for name, n in lengths.items()
        },
        **fields,
    }


def short_body() -> dict[str, Any]:
    lengths = {"thinker": 8, "talker": 40}
    return body(stage_sampling_params={name: {"max_tokens": n, "min_tokens": n} for name, n in lengths.items()})


def media_parts() -> list[dict[str, Any]]:
    """A long prompt with a picture and a sound."""
    (sound,), (picture,) = media("audio+image")
    file = io.BytesIO()
    picture.save(file, "PNG")
    wav = base64.b64encode(wav_bytes(sound, 16_000)).decode()
    return [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()},
        },
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "text", "text": "word " * 400},
    ]


@dataclass
class Heard:
    """What a client has of an answer."""

    text: str = ""
    pieces: list[bytes] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            if data := (choice["delta"].get("audio") or {}).get("data"):
                self.pieces.append(base64.b64decode(data))

    @property
    def samples(self) -> np.ndarray:
        return np.frombuffer(b"".join(self.pieces), np.int16) / 32768


async def told(asked: dict[str, Any]) -> AsyncIterator[Heard]:
    """All that the client has, after each event."""
    heard = Heard()
    client = httpx.AsyncClient(base_url=BASE_URL, timeout=REPLACED_S)
    async with client, client.stream("POST", CHAT, json=asked | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                heard.add(json.loads(line.removeprefix("data: ")))
                yield heard


_undisturbed: dict[str, Heard] = {}


async def undisturbed(asked: dict[str, Any]) -> Heard:
    """The answer as it is when nothing dies: not streamed, as the reference makes it."""
    name = json.dumps(asked)
    if name not in _undisturbed:
        async with httpx.AsyncClient(base_url=BASE_URL, timeout=REPLACED_S) as client:
            message = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]
        _undisturbed[name] = Heard(message["content"], [base64.b64decode(message["audio"]["data"])])
    return _undisturbed[name]


def assert_same(heard: Heard, expected: Heard) -> None:
    assert not heard.errors
    assert heard.text == expected.text
    assert len(heard.samples) == len(expected.samples)
    np.testing.assert_allclose(heard.samples, expected.samples, atol=STREAM_TOLERANCE + PCM16_STEP)


async def are_there(app: ServedApp, stages: Collection[str]) -> None:
    """Two replicas of each of them, and one of any other stage: a lost one may still be replaced."""

    async def enough() -> bool:
        return all([len(await app.living(stage)) >= (2 if stage in stages else 1) for stage in STAGES])

    await until(enough, f"two replicas of {', '.join(stages)}", REPLACED_S)


async def is_ready(app: ServedApp) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await asyncio.to_thread(app.client.get, "/ready")).status_code == 200
    return False


async def says_whether_it_is_ready() -> int:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=READY_S) as client:
        return (await client.get("/ready")).status_code


async def at_work(app: ServedApp, stage: str) -> dict[str, Any]:
    """The status of the replica that has the only request there is."""
    found: list[dict[str, Any]] = []

    async def has_one() -> bool:
        found[:] = [status for status in await app.living(stage) if status["open_outboxes"]]
        return len(found) == 1

    await until(has_one, f"one replica of {stage} has the request")
    return found[0]


async def requests_of(app: ServedApp, stage: str) -> dict[str, int]:
    """How many requests each replica of the stage has had."""
    return {status["replica_id"]: status["requests"] for status in await app.living(stage)}


async def kill_replica(app: ServedApp, stage: str) -> None:
    """With all that it started, which is gone at once."""
    processes = family((await at_work(app, stage))["pid"])
    os.kill(processes[0].pid, signal.SIGKILL)
    stayed = await asyncio.to_thread(running_after, processes, ENDED_S)
    assert not stayed, f"a process of {stage} stayed: {stayed}"


async def kill_engine(app: ServedApp, stage: str) -> None:
    os.kill(engine_of((await at_work(app, stage))["pid"]), signal.SIGKILL)


async def stop_engine(app: ServedApp, stage: str) -> None:
    """As who ends all processes of a host one by one: the engine ends its requests first, as if they were aborted."""
    os.kill(engine_of((await at_work(app, stage))["pid"]), signal.SIGTERM)


async def until_made(app: ServedApp, stage: str) -> None:
    """The stage has made all of the request, and the others have not."""

    async def is_made() -> bool:
        return not (await at_work(app, stage))["engine"]["running"]

    await until(is_made, f"{stage} has made its part")


Kill = Callable[[ServedApp, str], Awaitable[None]]


async def answer_with(
    app: ServedApp, asked: dict[str, Any], *kills: tuple[Callable[[Heard], bool], Kill, str]
) -> Heard:
    """The answer, while something is killed when what was heard is as it says."""
    left, heard = list(kills), Heard()
    async with contextlib.aclosing(told(asked)) as all_heard:
        async for heard in all_heard:
            if left and left[0][0](heard):
                _, kill, stage = left.pop(0)
                await kill(app, stage)
    assert not left, "the answer ended before all was killed"
    return heard


async def recoveries() -> dict[str, float]:
    counted = totals(await scrape())
    return {stage: counted["ingress_recovered_total", CHAT, stage] for stage in STAGES}


async def stalls_s() -> float:
    return totals(await scrape())["ingress_recovery_stall_seconds_sum", CHAT]


def text_begins(heard: Heard) -> bool:
    return bool(heard.text)


def much_text(heard: Heard) -> bool:
    return len(heard.text) > 40


def sound_begins(heard: Heard) -> bool:
    return bool(heard.pieces)


def much_sound(heard: Heard) -> bool:
    return len(heard.pieces) >= 3


async def survives(
    app: ServedApp, asked: dict[str, Any], *kills: tuple[Callable[[Heard], bool], Kill, str]
) -> dict[str, float]:
    """Recoveries by stage, of an answer that is the undisturbed one."""
    await are_there(app, {stage for _, _, stage in kills})
    expected = await undisturbed(asked)
    await until(lambda: nothing_is_left(app), "earlier requests are gone")
    before, stalled_s = await recoveries(), await stalls_s()
    assert_same(await answer_with(app, asked, *kills), expected)
    after = await recoveries()
    print(f"{[(kill.__name__, stage) for _, kill, stage in kills]}: stall {await stalls_s() - stalled_s:.3f} s")
    await until(lambda: nothing_is_left(app), "all replicas let go of the request")
    return {stage: after[stage] - before[stage] for stage in STAGES if after[stage] > before[stage]}


@pytest.mark.timeout(1200)
@pytest.mark.full
async def test_no_answer_is_lost_in_two_minutes_of_chaos(pairs: ServedApp) -> None:
    """`make chaos` for a while: its last clients may wait for a replica that starts. The first test: all are there."""
    before = await recoveries()
    report = await soaked(pairs, Plan(seconds=120, clients=12, every_s=15, seed=2))
    print(*report.lines(), sep="\n")
    assert report.is_good, "\n".join(report.lines())
    assert report.breaks and sum((await recoveries()).values()) > sum(before.values())
    assert report.count("exact") > len(report.breaks) and report.count("left") and report.count("refused")


@pytest.mark.timeout(900)
async def test_a_stream_goes_on_while_serve_s_controller_is_killed(pairs: ServedApp) -> None:
    """The later tests see that what is lost then is replaced."""

    async def kill_controller(app: ServedApp, _: str) -> None:
        app.actor("ServeController").kill()
        assert await says_whether_it_is_ready() in (200, 503)

    assert await survives(pairs, body(), (much_sound, kill_controller, "")) == {}
    await until(lambda: is_ready(pairs), "the next controller knows the replicas")


@pytest.mark.timeout(900)
async def test_streams_go_on_and_begin_while_ray_s_gcs_does_not_answer(pairs: ServedApp) -> None:
    """As while it is gone, until Ray gives up after a minute."""
    gcs = pairs.part_of_ray("gcs_server")

    async def stop_gcs(app: ServedApp, _: str) -> None:
        gcs.suspend()
        assert await says_whether_it_is_ready() == 200

    expected = await undisturbed(body()), await undisturbed(short_body())
    await are_there(pairs, STAGES)
    await until(lambda: is_ready(pairs), "all stages are known")
    try:
        heard = await answer_with(pairs, body(), (much_sound, stop_gcs, "")), await answer_with(pairs, short_body())
        assert await says_whether_it_is_ready() == 200
    finally:
        gcs.resume()
    for told_meanwhile, wanted in zip(heard, expected, strict=True):
        assert_same(told_meanwhile, wanted)
    await until(lambda: nothing_is_left(pairs), "all replicas let go of the requests")


@pytest.mark.timeout(900)
async def test_a_replica_that_stands_by_gets_no_request_while_another_lives(pairs: ServedApp) -> None:
    """The tests that kill thinkers see that it gets them then."""
    await are_there(pairs, {"thinker"})
    await asyncio.gather(*(answer_with(pairs, short_body()) for _ in range(2)))  # the ingress has heard of both by now
    before = await requests_of(pairs, "thinker")
    await asyncio.gather(*(answer_with(pairs, short_body()) for _ in range(6)))
    after = await requests_of(pairs, "thinker")
    assert [after[each] - before[each] for each in sorted(after)] == [6, 0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("thinker", text_begins),
        ("talker", sound_begins),
        ("code2wav", sound_begins),
        ("thinker", much_text),
        ("talker", much_sound),
        ("code2wav", much_sound),
    ],
)
async def test_a_stream_goes_on_when_a_replica_is_killed(
    pairs: ServedApp, stage: str, moment: Callable[[Heard], bool]
) -> None:
    assert await survives(pairs, body(), (moment, kill_replica, stage)) == {stage: 1}


@pytest.mark.timeout(900)
async def test_serve_s_proxy_is_killed_and_comes_again(pairs: ServedApp) -> None:
    """The connections are its own, and end with it."""

    async def kill_proxy(app: ServedApp, _: str) -> None:
        app.actor("ProxyActor").kill()

    with pytest.raises(httpx.TransportError):
        await answer_with(pairs, body(), (sound_begins, kill_proxy, ""))
    await until(lambda: nothing_is_left(pairs), "all replicas let go of the request")
    await until(lambda: is_ready(pairs), "another proxy serves", REPLACED_S)


@pytest.mark.timeout(900)
async def test_a_stream_goes_on_when_replicas_of_two_stages_are_killed(pairs: ServedApp) -> None:
    """The second once the answer went on. What is left of both stages has it alone: it may be what ends replicas."""
    before = await recoveries()

    async def kill_once_it_went_on(app: ServedApp, stage: str) -> None:
        async def went_on() -> bool:
            return (await recoveries())["talker"] > before["talker"]

        await until(went_on, "the answer goes on with another talker")
        await kill_replica(app, stage)

    kills = (much_sound, kill_replica, "talker"), (much_sound, kill_once_it_went_on, "code2wav")
    assert await survives(pairs, body(), *kills) == {"talker": 1, "code2wav": 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", ["thinker", "talker"])
async def test_a_stream_goes_on_when_a_replica_is_killed_that_had_made_its_part(pairs: ServedApp, stage: str) -> None:
    async def kill_once_made(app: ServedApp, stage: str) -> None:
        await until_made(app, stage)
        await kill_replica(app, stage)

    await survives(pairs, body(), (text_begins, kill_once_made, stage))


@pytest.mark.timeout(900)
async def test_a_long_prompt_with_media_is_read_again(pairs: ServedApp) -> None:
    """The engine of its first thinker is stopped before it comes: else all of it may have been read."""
    await are_there(pairs, {"thinker"})
    asked, had = body(media_parts()), await requests_of(pairs, "thinker")
    expected = await undisturbed(asked)
    await until(lambda: nothing_is_left(pairs), "earlier requests are gone")
    (reads,) = [each for each in await pairs.living("thinker") if each["requests"] > had[each["replica_id"]]]
    processes, before = family(reads["pid"]), await recoveries()
    os.kill(engine_of(reads["pid"]), signal.SIGSTOP)
    answer = asyncio.create_task(answer_with(pairs, asked))
    await at_work(pairs, "talker")
    os.kill(reads["pid"], signal.SIGKILL)
    assert not await asyncio.to_thread(running_after, processes, ENDED_S)
    assert_same(await answer, expected)
    assert (await recoveries())["thinker"] == before["thinker"] + 1
    await until(lambda: nothing_is_left(pairs), "all replicas let go of the request")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [kill_engine, stop_engine])
async def test_a_stream_goes_on_when_an_engine_is_ended(pairs: ServedApp, end: Kill) -> None:
    assert await survives(pairs, body(), (sound_begins, end, "talker")) == {"talker": 1}


@contextlib.asynccontextmanager
async def all_the_while(ask: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Asks again and again, as an ingress does: what is asked for lasts for seconds alone."""

    async def asks() -> None:
        while True:
            await ask()
            await asyncio.sleep(ASK_S)

    asking = asyncio.create_task(asks())
    try:
        yield
        assert not asking.done(), asking
    finally:
        asking.cancel()
        await asyncio.wait([asking])


def need_one_replica(stage: str) -> None:
    """Tells Serve's controller what its autoscaler would, which waits until the load was low for half a minute."""
    controller, of = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), DeploymentID(stage, "default")
    ray.get(controller.__ray_call__.remote(lambda self: self.deployment_state_manager.set_target_num_replicas(of, 1)))


@pytest.mark.timeout(900)
async def test_streams_of_a_replica_that_is_no_longer_needed_end_where_they_are(pairs: ServedApp) -> None:
    """The last test: one replica of code2wav is left."""
    await are_there(pairs, {"code2wav"})
    expected, before = await undisturbed(body()), await recoveries()
    await until(lambda: nothing_is_left(pairs), "earlier requests are gone")
    answers = [asyncio.create_task(answer_with(pairs, body())) for _ in range(2)]

    async def have_one_each() -> bool:
        return [status["open_outboxes"] for status in await pairs.living("code2wav")] == [1, 1]

    async def goes() -> bool:
        return "STOPPING" in serve.status().applications["default"].deployments["code2wav"].replica_states

    await until(have_one_each, "both replicas have one of the streams")
    await asyncio.to_thread(need_one_replica, "code2wav")
    await until(goes, "one of them is told to go")
    assert not any(answer.done() for answer in answers)
    for answer in answers:
        assert_same(await answer, expected)
    assert await recoveries() == before

    async def one_is_left() -> bool:
        return pairs.replicas("code2wav") == 1 and await nothing_is_left(pairs)

    await until(one_is_left, "it goes once its stream has ended")
