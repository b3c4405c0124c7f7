"""Files and bodies that could hurt whoever reads them, through HTTP: ingress and other clients do not notice."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from tests.http_app import MODEL, nothing_is_left
from tests.openai_api.bombs import image, long_video, png_bomb
from tests.processes import kill
from tests.served.app import BASE_URL, PATIENCE_S, ServedApp, until
from tests.served.decoder_bodies import BOMBS, asking
from tests.served.door_bodies import DEADLINE

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"
ROOM_BYTES = 256 << 20
"""For what an ingress may take more while it is sent bombs, each of which would take more in it."""


def decoders() -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if is_decoder(each)]


def is_decoder(process: psutil.Process) -> bool:
    """Of the served ingress, by the title that Ray gives it; one that has ended has no command line any more."""
    try:
        parent = process.parent()
        of_ingress = parent is not None and "ingress" in " ".join(parent.cmdline())
        return of_ingress and "omni_cluster.openai_api.decoder" in process.cmdline() and process.is_running()
    except psutil.Error:
        return False


def works(process: psutil.Process, was_s: float) -> bool:
    """Whether it took more than a decoder's start since it had taken `was_s`."""
    return cpu_s(process) > was_s + 1.5


def cpu_s(process: psutil.Process) -> float:
    try:
        return process.cpu_times().user
    except psutil.Error:
        return 0.0


@pytest.fixture(scope="module")
def ingress(served: ServedApp) -> psutil.Process:
    """Known once it has a decoder."""
    assert served.client.post(CHAT, json=asking(image(png_bomb(64, 64)))).status_code == 200
    (parent,) = {each.ppid() for each in decoders()}
    return psutil.Process(parent)


async def ready_decoders(client: httpx.AsyncClient) -> list[psutil.Process]:
    """Those that are there, one of which has just answered and takes the next request."""
    assert (await client.post(CHAT, json=asking(image(png_bomb(64, 64))))).status_code == 200
    return decoders()


@contextmanager
def most_rss_bytes(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """What it held at most, asked for again and again."""
    seen = [process.memory_info().rss]
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(0.02):
            seen.append(process.memory_info().rss)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield lambda: max(seen)
    finally:
        ends.set()
        watch.join()


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    """Those, and what is added to them inside."""
    try:
        for each in processes:
            each.suspend()
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


async def test_bombs_are_refused_in_one_sentence_and_the_ingress_stays_small(
    served: ServedApp, ingress: psutil.Process
) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before_bytes = ingress.memory_info().rss
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        with most_rss_bytes(ingress) as most:
            sent = [client.post(CHAT, json=asking(*parts)) for parts, _, _ in BOMBS.values()]
            answers = await asyncio.gather(*sent)
    for answer, (_, status, code) in zip(answers, BOMBS.values(), strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert error["message"].endswith(".") and "\n" not in error["message"]
    assert most() - before_bytes < ROOM_BYTES
    assert await nothing_is_left(served)


def test_a_large_body_is_checked_beside_the_ingress(served: ServedApp, ingress: psutil.Process) -> None:
    assert served.client.post(CHAT, json=asking(image(png_bomb(64, 64)))).status_code == 200  # one is idle, and has it
    before = {each: cpu_s(each) for each in decoders()}
    body = json.dumps(asking(user="\u00e9" * 5_000_000)).encode()  # escapes, which take longest to read
    answer = served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    # Three of the ticks in which it is counted.
    assert any(cpu_s(each) > was_s + 0.03 for each, was_s in before.items())


async def test_long_videos_keep_no_small_request_waiting_and_are_dropped_with_their_clients(
    served: ServedApp, ingress: psutil.Process
) -> None:
    body = json.dumps(asking(long_video())).encode()
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=4 * PATIENCE_S) as client:
        before = {each.pid: cpu_s(each) for each in decoders()}
        watching = [asyncio.create_task(client.post(CHAT, content=body, headers=headers)) for _ in range(5)]

        async def two_work() -> bool:
            return sum(cpu_s(each) > before.get(each.pid, 0.0) + 0.5 for each in decoders()) == 2

        await until(two_work, "two decoders work")
        busy = decoders()
        for _ in range(3):
            small = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            assert (await client.post(CHAT, json=small)).status_code == 200
            assert [(await client.get(path)).status_code for path in ("/ready", "/health")] == [200, 200]
        assert not any(each.done() for each in watching)
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def all_ended() -> bool:
        return not any(each.is_running() and is_decoder(each) for each in busy)

    await until(all_ended, "no decoder works for a client that has left")
    assert served.client.post(CHAT, json=asking(image(png_bomb(64, 64)))).status_code == 200
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


async def test_decoding_ends_at_the_request_s_own_deadline(served: ServedApp, ingress: psutil.Process) -> None:
    body = asking(image(png_bomb(64, 64)))
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=4 * PATIENCE_S) as client:
        stopped = await ready_decoders(client)
        with suspended(stopped):  # as if it decoded for ever
            while (late := await client.post(CHAT, json=body, headers=DEADLINE)).status_code == 200:
                for another in set(decoders()) - set(stopped):  # one is kept ready: it came meanwhile
                    stopped.append(another)
                    another.suspend()
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")

            async def one_has_ended() -> bool:
                return not all(each.is_running() and is_decoder(each) for each in stopped)

            await until(one_has_ended, "the decoder that worked for it has ended")
        assert (await client.post(CHAT, json=body)).status_code == 200


async def test_a_decoder_that_is_killed_is_its_request_s_fault_alone(
    served: ServedApp, ingress: psutil.Process
) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=4 * PATIENCE_S) as client:
        before = {each: cpu_s(each) for each in await ready_decoders(client)}
        asked = asyncio.create_task(client.post(CHAT, json=asking(long_video())))

        async def one_works() -> bool:
            return any(works(each, was_s) for each, was_s in before.items())

        await until(one_works, "a decoder works")
        killed = [each for each, was_s in before.items() if works(each, was_s)]
        for each in killed:
            kill(each)
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_unreadable")

        async def another_is_there() -> bool:
            return any(each not in killed for each in decoders())

        await until(another_is_there, "there is another decoder without a request")
        assert (await client.post(CHAT, json=asking(image(png_bomb(64, 64))))).status_code == 200


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
async def test_a_client_that_leaves_while_its_sound_is_coded_hurts_nobody(served: ServedApp, audio_format: str) -> None:
    spoken = asking(
        modalities=["text", "audio"], audio={"voice": "Ethan", "format": audio_format}, stream=True, seed=3,
        stage_sampling_params={"talker": {"max_tokens": 96, "min_tokens": 96}},
    )  # fmt: skip
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        async with client.stream("POST", CHAT, json=spoken) as answer:
            async for line in answer.aiter_lines():
                if '"data":"' in line:
                    break
        await until(lambda: nothing_is_left(served), "the stages let go of the request")
        whole = await client.post(CHAT, json=spoken)
    pieces = [json.loads(line[6:]) for line in whole.text.splitlines() if line.startswith("data: {")]
    sound = [each["choices"][0]["delta"].get("audio", {}).get("data", "") for each in pieces if each["choices"]]
    assert base64.b64decode("".join(sound))
