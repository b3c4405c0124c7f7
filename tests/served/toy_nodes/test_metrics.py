"""The metrics of the application, and the one line that each process logs of a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest
from tests.served.app import AUTHORIZED, BASE_URL, ServedApp, scrape, until, whole_scrape
from tests.server.samples import Totals, totals

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
STAGES = ("text", "codes", "sound")
SAMPLES_A_CODE = 160
SILENT_S = 6
"""So long a replica may be stopped: its watchdog ends it after eight seconds."""


async def scraped() -> Totals:
    return totals(await scrape())


async def all_scraped() -> Totals:
    return totals(await whole_scrape())


async def scraped_at_rest() -> Totals:
    """Once no request runs: an end is counted a moment after the client has its answer."""
    found: list[Totals] = []

    async def nothing_runs() -> bool:
        found[:] = [await all_scraped()]
        return not found[0]["ingress_requests_in_flight", CHAT] and not is_held(found[0])

    await until(nothing_runs, "no request runs")
    return found[0]


def is_held(counted: Totals) -> bool:
    names = ("stage_requests_running", "stage_requests_waiting", "stage_open_outboxes")
    return any(counted[name, stage] for name in names for stage in STAGES)


def grown(after: Totals, before: Totals) -> Totals:
    return Counter({key: after[key] - before[key] for key in after if after[key] != before[key]})


def body_of(text_tokens: int, codes: int, **options: Any) -> dict[str, Any]:
    exact = [{"max_tokens": n, "min_tokens": n} for n in (text_tokens, codes)]
    exact[0]["ignore_eos"] = True
    return {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": "Hello, a secret word."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "high", "format": "pcm16"},
        "sampling_params_list": [*exact, None],
        **options,
    }


async def test_counts_move_by_what_was_sent(toy_nodes: ServedApp) -> None:
    before = await scraped_at_rest()
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120) as client:

        async def post(body: dict[str, Any], **headers: str) -> bytes:
            return (await client.post(CHAT, json=body, headers=headers)).content

        answers = [
            await post(body_of(8, 30, stream=True), **AUTHORIZED),
            await post(body_of(6, 24), **AUTHORIZED),
            await post(body_of(5, 24, modalities=["text"], audio=None), **AUTHORIZED),
            await post(body_of(8, 30, model="nobody"), **AUTHORIZED),
            await post(body_of(8, 30)),
        ]
    moved = grown(await scraped_at_rest(), before)
    assert {key: moved[key] for key in moved if key[0] == "stage_requests_total"} == {
        ("stage_requests_total", "finished", "text"): 3,
        ("stage_requests_total", "finished", "codes"): 2,
        ("stage_requests_total", "finished", "sound"): 2,
    }
    assert moved["stage_tokens_total", "text"] == 8 + 6 + 5
    codes = moved["stage_tokens_total", "codes"]
    assert codes == 30 + 24
    assert moved["stage_samples_total", "sound"] == SAMPLES_A_CODE * codes
    assert moved["stage_pieces_total", "sound"] >= 3
    for name in ("first_output", "request"):
        counts = [moved[f"stage_{name}_seconds_count", stage] for stage in STAGES]
        assert counts == [3, 2, 2]
    assert moved["stage_handover_seconds_count", "text"] == 0 < moved["stage_handover_seconds_count", "codes"]
    assert {key: moved[key] for key in moved if key[0] == "ingress_requests_total" and key[1] == CHAT} == {
        ("ingress_requests_total", CHAT, "200"): 3,
        ("ingress_requests_total", CHAT, "404"): 1,
        ("ingress_requests_total", CHAT, "401"): 1,
    }
    assert moved["ingress_sent_bytes_total", CHAT] == sum(map(len, answers))
    assert moved["ingress_first_audio_seconds_count", CHAT] == 1
    assert moved["ingress_first_byte_seconds_count", CHAT] == moved["ingress_answer_seconds_count", CHAT] == 3


async def test_every_ingress_gives_the_same_totals(toy_nodes: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60, headers=AUTHORIZED) as client:
        # At once: the router gives to the ingress that has least to do, and so either gets some.
        await asyncio.gather(*(client.get("/v1/models") for _ in range(8)))
    scrapes = [await all_scraped() for _ in range(6)]
    assert len({scrape["ingress_requests_total", "/v1/models", "200"] for scrape in scrapes}) == 1
    text = await whole_scrape()
    for name, replicas in {"ingress_requests_in_flight": 2, "stage_requests_running": 3}.items():
        assert len(set(re.findall(rf'omni_cluster_{name}.*replica="(\w+)"', text))) == replicas


async def test_a_scrape_needs_a_key(toy_nodes: ServedApp) -> None:
    assert httpx.get(f"{BASE_URL}/metrics", timeout=60).status_code == 401


async def nothing_is_held() -> bool:
    return not is_held(await all_scraped())


async def all_hold_it() -> bool:
    """Whether the one request that runs has come to every stage: one that is left before is never counted there."""
    held = await scraped()
    return all(held["stage_open_outboxes", stage] == 1 for stage in STAGES)


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """A long answer whose first text is there; at the context's end the client leaves."""
    client = httpx.AsyncClient(base_url=BASE_URL, timeout=60, headers=AUTHORIZED)
    async with client, client.stream("POST", CHAT, json=body_of(500, 1500, stream=True)) as response:
        lines = response.aiter_lines()
        while '"content":"' not in (line := await anext(lines)) or '"content":""' in line:
            pass
        yield


async def test_a_request_that_is_left_is_cancelled_in_every_stage(toy_nodes: ServedApp) -> None:
    before = await all_scraped()
    async with answering():
        await until(all_hold_it, "every stage has the request")

    async def all_are_cancelled() -> bool:
        moved = grown(await all_scraped(), before)
        ended = {key for key in moved if key[0] in ("stage_requests_total", "ingress_requests_total")}
        cancelled = {("stage_requests_total", "cancelled", stage) for stage in STAGES}
        # Serve ends the stages' calls too: where the ingress hears of that first, its stream ends with an error event.
        left = {("ingress_requests_total", CHAT, status) for status in ("499", "200")}
        assert not ended - cancelled - left - {("ingress_requests_total", "/metrics", "200")}
        assert all(moved[key] <= 1 for key in cancelled) and sum(moved[key] for key in left) <= 1
        return cancelled <= ended and bool(left & ended)

    await until(all_are_cancelled, "every process has counted that the client left")
    await until(nothing_is_held, "all stages let go of the request")


async def test_what_runs_is_held_until_its_end(toy_nodes: ServedApp) -> None:
    await scraped_at_rest()
    async with answering():
        running = await all_scraped()
    assert running["ingress_requests_in_flight", CHAT] == 1
    assert running["stage_open_outboxes", "text"] == 1
    await until(nothing_is_held, "all stages let go of the request")


async def test_what_a_stage_refuses_has_failed_there(toy_nodes: ServedApp) -> None:
    before = await scraped_at_rest()
    request = OmniRequest("hot", "Hello.", sampling={"codes": {"min_tokens": 2, "max_tokens": 1}})
    with pytest.raises(RequestError, match="min_tokens"):
        await toy_nodes.answer(request)
    moved = grown(await scraped_at_rest(), before)
    assert moved["stage_requests_total", "failed", "codes"] == 1
    assert moved["stage_requests_total", "failed", "text"] == 0


async def test_a_replica_that_does_not_answer_is_left_out_and_counted(toy_nodes: ServedApp) -> None:
    before = await all_scraped()
    (silent,) = await toy_nodes.statuses_of("codes")
    only_it = {"ingress": 0, "text": 0, "codes": 1, "sound": 0}
    without: Totals = Counter()

    async def the_others_answer() -> bool:
        nonlocal without
        without = await scraped()
        return {stage: without["scrape_missing", stage] for stage in only_it} == only_it

    os.kill(silent["pid"], signal.SIGSTOP)
    try:
        await until(the_others_answer, "it alone is missing", SILENT_S)
    finally:
        os.kill(silent["pid"], signal.SIGCONT)
    assert ("stage_tokens_total", "codes") not in without
    assert without["stage_tokens_total", "text"] == before["stage_tokens_total", "text"]
    after = await all_scraped()
    assert after["stage_tokens_total", "codes"] == before["stage_tokens_total", "codes"]


async def test_a_request_s_id_is_in_the_log_of_every_stage(toy_nodes: ServedApp) -> None:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    sent = {**AUTHORIZED, "x-request-id": "find-me.1"}
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120) as client:
        answer = await client.post(CHAT, json=body_of(8, 30, stream=True), headers=sent)
    assert answer.status_code == 200
    of_request = re.compile(r"request (find-me\.1\S*: .*)")

    def lines(deployment: str) -> list[str]:
        files = logs.glob(f"replica_default_{deployment}_*.log")
        return [found[1] for file in files for found in of_request.finditer(file.read_text())]

    async def all_have_said_it() -> bool:
        return all(lines(deployment) for deployment in ("ingress", *STAGES))

    await until(all_have_said_it, "every log has the request")
    (said,) = lines("ingress")
    assert re.fullmatch(rf"find-me\.1: {CHAT} answered 200 after \d+\.\d{{3}} s", said)
    made = {"text": (8, 0), "codes": (30, 0), "sound": (0, 30 * SAMPLES_A_CODE)}
    for stage, (tokens, samples) in made.items():
        (said,) = lines(stage)
        expected = rf"finished in stage {stage} after \d+\.\d{{3}} s, {tokens} tokens, {samples} samples"
        assert re.fullmatch(rf"find-me\.1-[0-9a-f]{{8}}: {expected}", said)
    files = [file.read_text() for file in logs.glob("replica_*.log")]
    assert json.dumps(files).count("secret word") == 0
