"""A replica of any stage dies at any moment of a stream, with the engines of the default family."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from omni_cluster.openai_api.audio import wav_bytes
from tests.chaos.soak import Plan, nothing_is_left, soaked
from tests.http_app import STREAM_TOLERANCE
from tests.processes import engine_of, family, running_after
from tests.reference import media
from tests.served.app import ROOT, ServedApp, serve_run, until
from tests.served.recovering import ENDED_S, Kill, Recovering, at_work, sound_begins
from tests.served.recovery_promises import RecoveryPromises

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


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


@pytest.fixture(scope="module")
def recovering(pairs: ServedApp) -> Recovering:
    lengths, short = {"thinker": 500, "talker": 1200}, {"thinker": 8, "talker": 40}
    return Recovering(pairs, lengths, short, voice="Ethan", tolerance=STREAM_TOLERANCE)


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


async def test_no_answer_is_lost_in_two_minutes_of_chaos(pairs: ServedApp, recovering: Recovering) -> None:
    """`make chaos` for a while: its last clients may wait for a replica that starts. The first test: all are there."""
    before = await recovering.recoveries()
    report = await soaked(pairs, Plan(seconds=120, clients=12, every_s=15, seed=2))
    print(*report.lines(), sep="\n")
    assert report.is_good, "\n".join(report.lines())
    assert report.breaks and sum((await recovering.recoveries()).values()) > sum(before.values())
    assert report.count("exact") > len(report.breaks) and report.count("left") and report.count("refused")


async def test_a_long_prompt_with_media_is_read_again(pairs: ServedApp, recovering: Recovering) -> None:
    """The engine of its first thinker is stopped before it comes: else all of it may have been read."""
    await recovering.are_there({"thinker"})
    asked, had = recovering.body(media_parts()), await recovering.requests_of("thinker")
    expected = await recovering.undisturbed(asked)
    await until(lambda: nothing_is_left(pairs), "earlier requests are gone")
    (reads,) = [each for each in await pairs.living("thinker") if each["requests"] > had[each["replica_id"]]]
    processes, before = family(reads["pid"]), await recovering.recoveries()
    os.kill(engine_of(reads["pid"]), signal.SIGSTOP)
    answer = asyncio.create_task(recovering.answer_with(asked))
    await at_work(pairs, "talker")
    os.kill(reads["pid"], signal.SIGKILL)
    assert not await asyncio.to_thread(running_after, processes, ENDED_S)
    recovering.assert_same(await answer, expected)
    assert (await recovering.recoveries())["thinker"] == before["thinker"] + 1
    await until(lambda: nothing_is_left(pairs), "all replicas let go of the request")


async def kill_engine(app: ServedApp, stage: str) -> None:
    os.kill(engine_of((await at_work(app, stage))["pid"]), signal.SIGKILL)


async def stop_engine(app: ServedApp, stage: str) -> None:
    """As when a host ends its processes one by one: the engine ends its requests first, as if they were aborted."""
    os.kill(engine_of((await at_work(app, stage))["pid"]), signal.SIGTERM)


@pytest.mark.parametrize("end", [kill_engine, stop_engine])
async def test_a_stream_goes_on_when_an_engine_is_ended(recovering: Recovering, end: Kill) -> None:
    assert await recovering.survives(recovering.body(), (sound_begins, end, "talker")) == {"talker": 1}


class TestRecovery(RecoveryPromises):
    """With sound within the tolerance of streams."""
