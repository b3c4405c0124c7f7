"""What runs while an ingress dies, while the application is deployed anew, and when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from ray import serve

from tests.http_app import nothing_is_left
from tests.processes import command_line, running_after, shared_memory_of
from tests.served.app import BASE_URL, PATIENCE_S, ServedApp, until
from tests.served.deployed import run_serve
from tests.served.recovering import CHAT, Heard, Recovering, told
from tests.served.replaced import REPLACED_S, process_ids

END_S = 240


@contextlib.asynccontextmanager
async def speaking(*bodies: dict[str, object]) -> AsyncIterator[list[asyncio.Task[Heard]]]:
    """Streams, each of which has sound when it opens."""
    begun = [asyncio.Event() for _ in bodies]

    async def read(body: dict[str, object], has_sound: asyncio.Event) -> Heard:
        async for heard in told(body):
            if heard.pieces:
                has_sound.set()
        return heard

    tasks = [asyncio.create_task(read(*each)) for each in zip(bodies, begun, strict=True)]
    try:
        async with asyncio.timeout(END_S):
            for event, task in zip(begun, tasks, strict=True):
                sounds = asyncio.create_task(event.wait())
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


async def turns_away(body: dict[str, object]) -> bool:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        answer = await client.post(CHAT, json=body)
    return answer.status_code == 503 and answer.json()["error"]["code"] == "server_closing"


class DrainPromises:
    """Of an application with one replica of each of three stages. The fixture `file` is for `serve deploy`: it has the
    application, with other replicas, and another one at `/beside`. The tests need their order; the last ends it all.
    """

    num_long = 2
    """Long answers that together take longer than `limits.closing_grace_s`."""

    def ask_beside(self, client: httpx.Client) -> None:
        """Sees that the other application answers, and by its own configuration."""
        raise NotImplementedError

    async def test_an_ingress_that_is_killed_leaves_nothing_and_sdks_ask_again(self, recovering: Recovering) -> None:
        app = recovering.app
        async with AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=20, timeout=END_S) as client:
            async with speaking(recovering.body()) as (task,):
                asked = recovering.body(audio={"voice": recovering.voice, "format": "wav"})
                whole = asyncio.create_task(client.post("/chat/completions", cast_to=httpx.Response, body=asked))

                async def are_at_work() -> bool:
                    return all(status["open_outboxes"] == 2 for status in await app.statuses())

                await until(are_at_work, "both requests are in all stages")
                os.kill(ingress_pid(app), signal.SIGKILL)
                with pytest.raises(httpx.TransportError):  # what OpenAI's clients call APIConnectionError
                    await task
            answer = await asyncio.wait_for(whole, END_S)
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["audio"]["data"]
        await until(lambda: nothing_is_left(app), "all stages let go of both requests")

    @pytest.mark.timeout(900)
    async def test_a_stream_outlives_the_replicas_that_serve_deploy_replaces(
        self, recovering: Recovering, file: Path
    ) -> None:
        app, second = recovering.app, recovering.app.stages[1]
        expected, before = await recovering.undisturbed(recovering.body()), await process_ids(app)
        async with speaking(recovering.body()) as (task,):
            await asyncio.to_thread(run_serve, "deploy", "-a", app.dashboard_url, str(file))

            async def goes() -> bool:
                assert (await asyncio.to_thread(app.client.get, "/ready")).status_code == 200
                deployments = serve.status().applications["default"].deployments  # none while the application is built
                return second in deployments and "STOPPING" in deployments[second].replica_states

            await until(goes, "an old replica is told to go")
            recovering.assert_same(await asyncio.wait_for(task, END_S), expected)

        async def both_run() -> bool:
            return [each.status.value for each in serve.status().applications.values()] == ["RUNNING"] * 2

        await until(both_run, "both applications run", REPLACED_S)
        assert not set((await process_ids(app)).values()) & set(before.values())
        recovering.assert_same(await recovering.answer_with(recovering.body()), expected)

    async def test_the_applications_of_one_file_answer_beside_each_other(self, recovering: Recovering) -> None:
        client = recovering.app.client
        for prefix in ("", "/beside"):
            assert (await asyncio.to_thread(client.get, f"{prefix}/ready")).status_code == 200
        await asyncio.to_thread(self.ask_beside, client)

    @pytest.mark.timeout(900)
    async def test_streams_may_end_after_sigterm_or_are_told(self, recovering: Recovering) -> None:
        app, short, long = recovering.app, recovering.short_body(), [recovering.body()] * self.num_long
        expected, stages = await recovering.undisturbed(short), app.stages
        app.close()  # or this process would be ended with the cluster
        started = psutil.Process(app.process.pid).children(recursive=True)
        shared = shared_memory_of(started)
        async with speaking(*long) as cut, speaking(short) as (ends_well,):
            app.process.send_signal(signal.SIGTERM)
            ends = asyncio.create_task(asyncio.to_thread(app.process.communicate, timeout=END_S))
            await until(lambda: turns_away(short), "new requests are turned away")
            recovering.assert_same(await asyncio.wait_for(ends_well, END_S), expected)
            for heard in await asyncio.wait_for(asyncio.gather(*cut), END_S):
                assert [error["code"] for error in heard.errors] == ["server_closing"]
        await ends
        assert app.process.returncode == 0
        assert len(started) > len(stages)
        stayed = await asyncio.to_thread(running_after, started, PATIENCE_S)
        assert not stayed, f"{stayed} stayed"
        assert not any(path.exists() for path in shared), shared
