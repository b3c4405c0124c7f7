"""Replicas follow the load of a running application, up to a node that is added, down and to sleep; nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
import yaml
from ray.exceptions import RayError

from omni_cluster.api_client import BadAnswer
from tests.chaos.cases import Case, chat
from tests.chaos.clients import NO_LIMITS, PATIENCE_S, Told, ask_streamed, ask_whole, difference
from tests.chaos.soak import nothing_is_left
from tests.served.app import BASE_URL, ROOT, STAGES, ServedApp, scrape, serve_run_over_nodes, until, whole_scrape
from tests.server.samples import totals

pytestmark = pytest.mark.cluster

CLIENTS, TALKERS = 12, 3
CODES = 16
SCALED_S = 400
"""Until replicas that are needed run, or others have gone: two engines start on busy cores."""
SLEEPERS = ("talker", "code2wav")
LONG = "Count with me. " * 90
"""The talker's work is the prompt; there is little sound to make."""
CASES = (
    chat("greedy", LONG, text=8, codes=CODES),
    chat("seeded", LONG, text=8, codes=CODES, fields={"temperature": 1.0, "seed": 11}),
)
TEXT = chat("text", "Tell me of the sky.", codes=0)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """One to three talkers by what they are expected to say still, one code2wav; both sleep when nobody needs them.

    A talker takes one request at a time and a few tokens of its prompt in a step, and computes prompts whole: it is
    what the others wait for. The node has room for one: the others need a node that is added.
    """
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text())
    delays = {"upscale_delay_s": 3, "downscale_delay_s": 8}
    bounds = {"min_replicas": 0, "initial_replicas": 1}
    of = {
        "talker": {"max_replicas": TALKERS, "signals": {"max_backlog_tokens": 1.5 * CODES}},
        "code2wav": {"max_replicas": 1, "signals": {"max_slack_use": 1}},
    }
    config["stages"][1]["num_cpus"] = 0.4
    slow = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    config["stages"][1]["engine_args"] |= slow
    for stage in config["stages"][1:]:
        del stage["num_replicas"]
        stage["autoscaling"] = {**bounds, **delays, **of[stage["model_stage"]]}
    path = tmp_path_factory.mktemp("config") / "scaled.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run_over_nodes(f"config={path}", roles=("head",)) as app:
        yield app


@dataclass
class Load:
    """Clients that ask one request after another, as many at once as is said."""

    expected: dict[str, Told]
    done: list[Told] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _wanted: int = 0

    def be(self, clients: int) -> None:
        """Those that are too many finish what they have."""
        self._wanted = clients
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(clients):
            if number >= len(self._tasks):
                self._tasks.append(asyncio.create_task(self._ask_on(number)))

    async def until_answered(self, more: int) -> None:
        wanted = len(self.done) + more

        async def are_there() -> bool:
            return bool(self.lost) or len(self.done) >= wanted

        await until(are_there, f"{more} answers more", SCALED_S)

    async def aclose(self) -> None:
        """Those that are there finish what they have: whoever comes later, after a failure too, is alone."""
        self._wanted = 0
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, number: int) -> None:
        async with client() as http:
            while number < self._wanted:
                await self._ask(http, CASES[number % len(CASES)])

    async def _ask(self, http: httpx.AsyncClient, case: Case) -> None:
        try:
            told = await ask_streamed(http, case)
        except (BadAnswer, httpx.HTTPError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
            return
        self.done.append(told)
        if differs := difference(told, self.expected[case.name]):
            self.lost.append(differs)


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S, trust_env=False, limits=NO_LIMITS)


async def expected_of(cases: Sequence[Case]) -> dict[str, Told]:
    async with client() as http:
        return {case.name: await ask_whole(http, case) for case in cases}


@dataclass
class Watched:
    """Clients and the replicas that run, over time."""

    began_s: float = field(default_factory=time.monotonic)
    changes: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.changes.append(f"{time.monotonic() - self.began_s:6.1f} s: {what}")

    async def watch(self, app: ServedApp) -> None:
        last = ""
        while True:
            counts = ", ".join([f"{stage} {len(await app.living(stage))}" for stage in STAGES])
            if counts != last:
                self.note(counts)
            last = counts
            await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def watched(app: ServedApp) -> AsyncIterator[Watched]:
    seen = Watched()
    task = asyncio.create_task(seen.watch(app))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_running(app: ServedApp, stage: str, count: int) -> None:
    """So many, and none that starts or ends."""

    async def runs() -> bool:
        return len(await app.living(stage)) == count and await asyncio.to_thread(app.replicas, stage) == count

    await until(runs, f"{count} replicas of {stage}", SCALED_S)


async def until_wanted(app: ServedApp, stage: str, count: int) -> None:
    """Some of them wait for a node that has room."""

    async def are_wanted() -> bool:
        return await asyncio.to_thread(app.replicas, stage) == count

    await until(are_wanted, f"{count} replicas of {stage} are wanted", SCALED_S)


def add_node(app: ServedApp) -> None:
    assert app.nodes is not None
    app.nodes.add("second")  # in the main thread, where Ray sets signal handlers


async def recoveries() -> float:
    return sum(count for (name, *_), count in totals(await scrape()).items() if name == "ingress_recovered_total")


async def another_controller(app: ServedApp) -> None:
    """Kills Serve's, and waits for the next."""
    app.actor("ServeController").kill()

    async def knows() -> bool:
        with contextlib.suppress(RayError):
            return await asyncio.to_thread(app.replicas, "talker") > 0
        return False

    await until(knows, "the next controller knows the replicas")


def waited_s(told: Sequence[Told]) -> list[float]:
    """Until the first sound, which all of them have."""
    return [each.first_sound_s for each in told if each.first_sound_s is not None]


def percentiles(of: Callable[[Told], float | None], told: Sequence[Told]) -> str:
    seconds = [value for each in told if (value := of(each)) is not None]
    return "p50 {:.2f} s, p99 {:.2f} s".format(*np.percentile(seconds, [50, 99]))


@pytest.mark.timeout(1500)
async def test_talkers_follow_a_load_that_comes_and_goes_and_no_request_is_lost(scaled: ServedApp) -> None:
    """Each of them has its answer, exactly: also those who speak while Serve's controller is killed, and while talkers
    are taken away. 99 in 100 wait less for their sound than two talkers more take to be there.
    """
    load = Load(await expected_of(CASES))
    async with watched(scaled) as seen, contextlib.aclosing(load):
        load.be(1)
        await load.until_answered(3)
        await until_running(scaled, "talker", 1)
        load.be(CLIENTS)
        came_s = time.monotonic()
        seen.note(f"{CLIENTS} clients")
        await until_wanted(scaled, "talker", TALKERS)
        add_node(scaled)
        seen.note("another node")
        await until_running(scaled, "talker", TALKERS)
        grew_s = time.monotonic() - came_s
        assert len({status["node_id"] for status in await scaled.living("talker")}) == 2
        await another_controller(scaled)
        seen.note("another controller")
        await load.until_answered(CLIENTS)
        load.be(1)
        seen.note("1 client")
        await until_running(scaled, "talker", 1)
    print(*seen.changes, sep="\n")
    print(f"{len(load.done)} answers, {len(load.lost)} lost or different")
    print("first text:", percentiles(lambda told: told.first_text_s, load.done))
    print("first sound:", percentiles(lambda told: told.first_sound_s, load.done))
    assert not load.lost
    assert await recoveries() == 0
    assert np.percentile(waited_s(load.done), 99) < grew_s  # nobody waits longer than what is missing takes to start


@pytest.mark.timeout(900)
async def test_stages_sleep_when_nobody_needs_them_and_the_host_is_ready(scaled: ServedApp) -> None:
    for stage in SLEEPERS:
        await until_running(scaled, stage, 0)
    asleep = {"ready": True, "replicas": {"thinker": 1, "talker": 0, "code2wav": 0}, "asleep": list(SLEEPERS)}

    async def is_ready_with_them_asleep() -> bool:
        answer = await asyncio.to_thread(scaled.client.get, "/ready")
        assert answer.status_code == 200, answer.text
        return bool(answer.json() == asleep)

    await until(is_ready_with_them_asleep, "the ingress knows that they sleep")
    (expected,) = (await expected_of([TEXT])).values()
    assert expected.text and not len(expected.sound)
    counted = totals(await whole_scrape())
    assert [counted["scrape_missing", stage] for stage in STAGES] == [0, 0, 0]
    assert [await asyncio.to_thread(scaled.replicas, stage) for stage in SLEEPERS] == [0, 0]


@pytest.mark.timeout(900)
async def test_a_request_wakes_all_stages_that_it_needs_and_is_answered(scaled: ServedApp) -> None:
    case = CASES[0]
    async with client() as http:
        told = await ask_streamed(http, case)
        again = await ask_streamed(http, case)
    print(f"woken: first text after {told.first_text_s:.2f} s, first sound after {told.first_sound_s:.2f} s")
    assert told.text and len(told.sound) and not difference(told, again)
    await until(lambda: nothing_is_left(scaled), "all replicas let go of the requests")
