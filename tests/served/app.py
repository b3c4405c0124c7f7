"""The application as its users start it, `serve run`, and what a test asks it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import ray
from ray import serve
from ray._common.utils import reset_ray_address
from ray._private.utils import read_ray_address
from ray.cluster_utils import Cluster
from ray.serve.context import _set_global_client

from omni_cluster.cluster.transport import ANSWER_S, ask_all
from omni_cluster.engine.exposition import CONTENT_TYPE
from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint
from omni_cluster.types.inputs import Media, OmniRequest
from tests.processes import command_line, kill
from tests.reference import media, prompt_text
from tests.server.samples import totals

ROOT = Path(__file__).parents[2]
BASE_URL = "http://127.0.0.1:8000"
STAGES = ("thinker", "talker", "code2wav")
KEY = "a-key-of-the-tests"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
"""Sent always: where no key is needed, none is looked at."""
START_S = 400
STORE_BYTES = 1 << 30
CPUS_BESIDE_CARDS = 16
"""Of a node with cards, in Ray's books."""
FULL_DISK = {"local_fs_capacity_threshold": 0.0, "automatic_object_spilling_enabled": False}
"""Ray moves nothing from its stores to the disk: a full store can be had."""
TRACING = {
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "ray.serve._private.tracing_utils:default_tracing_exporter",
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "0",
}
"""Requests are traced whose client says so in `traceparent`, into files beside the logs."""
TOYS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "families"), os.environ.get("PYTHONPATH", "")])}
"""Families that the tests have of their own."""
EVERY_LINE = {"RAY_DEDUP_LOGS": "0"}
"""Ray prints one of lines that differ in numbers only, as those on requests do."""
PATIENCE_S = 60
"""Until a condition that must come: a test that waits this long has failed."""


class ServedApp:
    """A running `serve run deployments:app`, and this process connected to its cluster."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.dashboard_url = f"http://{ray._private.worker._global_node.webui_url}"
        self.nodes: Nodes | None = None
        self.printed = ""
        """All that it printed, once it has ended."""
        self.client = httpx.Client(base_url=BASE_URL, timeout=120, headers=AUTHORIZED)
        self._handles: dict[str, Any] = {}
        self.stages = tuple(self.client.get("/ready").json()["replicas"])

    @property
    def model(self) -> str:
        """What requests call it."""
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def close(self) -> None:
        """Leaves the cluster. A handle that stays would start a Ray of its own to report its statistics to."""
        self.client.close()
        for handle in self._handles.values():
            handle.shutdown()
        self._handles.clear()
        ray.shutdown()

    def handle(self, deployment: str) -> Any:
        if deployment not in self._handles:
            self._handles[deployment] = serve.get_deployment_handle(deployment, "default")
        return self._handles[deployment]

    async def answer(self, request: OmniRequest) -> Any:
        return await self.handle("ingress").answer.remote(request)

    def actor(self, name: str) -> psutil.Process:
        """The process of the only actor whose class's name begins so."""
        processes = psutil.Process().children(recursive=True)  # those of nodes that were added are not the server's
        (found,) = [each for each in processes if command_line(each).startswith(f"ray::{name}")]
        return found

    def part_of_ray(self, name: str) -> psutil.Process:
        """The process of Ray's own of that name; of the server's node."""
        (found,) = [
            each
            for each in psutil.Process(self.process.pid).children(recursive=True)
            if command_line(each).split(" ")[0].endswith(name)
        ]
        return found

    def replicas(self, stage: str) -> int:
        """Replicas that Serve runs or starts."""
        states = serve.status().applications["default"].deployments[stage].replica_states
        return sum(states.values())

    async def statuses(self) -> list[dict[str, Any]]:
        """What every replica of every stage holds."""
        return [status for name in self.stages for status in await self.statuses_of(name)]

    async def living(self, stage: str) -> list[dict[str, Any]]:
        """What the replicas hold that answer: one that died may still be listed."""
        return [status for status in await ask_all(self.handle(stage), "status", ANSWER_S) if status is not None]

    async def statuses_of(self, stage: str) -> list[dict[str, Any]]:
        responses = self.handle(stage).broadcast("status")
        return await asyncio.to_thread(responses.results, timeout_s=PATIENCE_S)


@contextmanager
def serve_run(*arguments: str) -> Iterator[ServedApp]:
    """The application on a Ray of its own."""
    forget_killed_cluster()
    with _served("auto", *arguments) as app:
        yield app


def forget_killed_cluster(folder: str | None = None) -> None:
    """A killed cluster of several nodes leaves its address in Ray's `folder`: `serve run` would wait for it."""
    address = read_ray_address(folder)
    if address is not None and not _listens(address):
        reset_ray_address(folder)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE_S).close()
    except OSError:
        return False
    return True


@contextmanager
def serve_run_over_nodes(
    *arguments: str, roles: Sequence[str], system_config: Mapping[str, Any] | None = None, cards_of_a_node: int = 0
) -> Iterator[ServedApp]:
    """The application over nodes of one cluster on this machine, each with a role as its label; the first is the head.
    `system_config`: of Ray itself, on all nodes. `cards_of_a_node`: the machine's cards in turn, so many for each.
    """
    counts = range(0, len(roles) * cards_of_a_node, cards_of_a_node or 1)
    cards = {role: range(first, first + cards_of_a_node) for role, first in zip(roles, counts, strict=False)}
    head, *others = roles
    ray_options = {} if system_config is None else {"_system_config": dict(system_config)}
    cluster = cluster_of(node_options(head, cards.get(head, ())) | ray_options)
    try:
        nodes = {role: started_node(cluster, role, cards.get(role, ())) for role in others}
        with serve_run_on(cluster.address, *arguments) as app:
            app.nodes = Nodes(cluster, nodes, cards)
            yield app
    finally:
        cluster.shutdown()


@contextmanager
def serve_run_on(address: str, *arguments: str) -> Iterator[ServedApp]:
    """The application on a cluster that runs.

    HTTP comes to the head alone: the nodes share their host's ports, and a connection must not end with another node.
    """
    try:
        ray.init(address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        serve.start(proxy_location="HeadOnly")
        with _served(address, *arguments) as app:
            yield app
    finally:
        ray.shutdown()


def node_options(role: str, cards: Sequence[int] = ()) -> dict[str, Any]:
    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "labels": {"role": role}, "env_vars": TRACING | TOYS}
    if not cards:
        return options
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}
    return options | {"num_cpus": CPUS_BESIDE_CARDS, "num_gpus": len(cards), "env_vars": TRACING | TOYS | seen}


def cluster_of(head: Mapping[str, Any]) -> Cluster:
    """With its dashboard, by which Serve is asked to deploy. Ray goes on without one that ends as it starts."""
    for number in range(1, STARTS + 1):
        before = psutil.Process().children(recursive=True)
        try:
            cluster = Cluster(initialize_head=True, head_node_args=dict(head))
        except Exception:  # what Ray raises where no raylet began: a fork beside threads of gRPC's may stand still
            begun = set(psutil.Process().children(recursive=True)) - set(before)
            for each in begun:
                kill(each)
            psutil.wait_procs(begun, timeout=PATIENCE_S)
            if number == STARTS:
                raise
            continue
        if cluster.head_node.webui_url:
            return cluster
        cluster.shutdown()
    raise AssertionError(f"the dashboard ended {STARTS} times as it started")


STARTS = 3
SETTLES_S = 3.0
"""In which a raylet that does not start well ends."""


@dataclass
class Nodes:
    """The nodes of a cluster on this machine but its head, by their role."""

    cluster: Cluster
    by_role: dict[str, Any]
    cards: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def kill(self, role: str) -> None:
        """All processes of the node, at once."""
        self.cluster.remove_node(self.by_role.pop(role), allow_graceful=False)

    def add(self, role: str) -> None:
        self.by_role[role] = started_node(self.cluster, role, self.cards.get(role, ()))


def started_node(cluster: Cluster, role: str, cards: Sequence[int]) -> Any:
    """As a host's supervisor does it: a raylet that ends as it starts, as Ray's may, is begun again."""
    for number in range(1, STARTS + 1):
        try:
            node = cluster.add_node(**node_options(role, cards))
        except Exception:  # what Ray raises where a raylet ended before anything knew of it
            if number == STARTS:
                raise
            continue
        time.sleep(SETTLES_S)
        if not node.dead_processes():
            return node
        cluster.remove_node(node, allow_graceful=False)
    raise AssertionError(f"a node for {role} ended {STARTS} times as it started")


@contextmanager
def _served(address: str, *arguments: str) -> Iterator[ServedApp]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | TRACING | EVERY_LINE | TOYS
    if address != "auto":
        environment["RAY_ADDRESS"] = address
    command = [*_serve_command(), "run", "deployments:app", *arguments]
    app = None
    # A pipe that nobody reads would hold the server up once it is full.
    output = tempfile.TemporaryFile("a+")  # noqa: SIM115
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(is_up, process, output)
        if not ray.is_initialized():
            ray.init(address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        wait_until(is_running, process, output)
        app = ServedApp(process)
        yield app
    finally:
        if app is not None:
            app.close()
        ray.shutdown()  # or this process would be ended with the cluster
        _set_global_client(None)  # Serve would go on asking the controller of this cluster in the next one
        _end(process)
        printed = _all_of(output)
        output.close()
        if app is not None:
            app.printed = printed
    ended_well(process.returncode, printed)
    for stage in () if app is None else app.stages:
        assert re.search(rf"{stage}: starts the engine took \d+\.\d s", printed), printed[:4000]


def _serve_command() -> Sequence[str]:
    """`serve`, or the module behind it where Ray was unpacked without its commands."""
    command = Path(sys.executable).with_name("serve")
    return [str(command)] if command.exists() else [sys.executable, "-m", "ray.serve.scripts"]


def _end(process: subprocess.Popen[str]) -> None:
    """As a supervisor does."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its exit code tells
        process.wait()


_OF_A_REPLICA = re.compile(r"(\x1b\[\d+m)?\((ServeReplica|ServeController|ProxyActor)")


def ended_well(exit_code: int, printed: str) -> None:
    """SIGTERM ends a server in order: no process breaks off in the midst, and nothing native is printed."""
    assert exit_code == 0, printed[-4000:]
    assert "*** SIG" not in printed and "Fatal Python error" not in printed, printed[-4000:]
    # Replicas log what fails on purpose in the tests; each of their lines begins with their name.
    own = "\n".join(line for line in printed.splitlines() if not _OF_A_REPLICA.match(line))
    for mark in ("Stack trace", "Traceback", "graceful_shutdown"):
        assert mark not in own, own[-4000:]


def long_checkpoint() -> Path:
    """The tiny checkpoint, said to have been trained on prompts as long as the real one's: its positions are rotary."""
    tiny = embedded_checkpoint("tiny")
    made = Path(tempfile.gettempdir()) / f"omni_cluster_tests_{os.getuid()}" / f"{tiny.name}-long"
    made.mkdir(parents=True, exist_ok=True)
    for file in tiny.iterdir():
        text = file.read_text() if file.suffix == ".json" else ""
        if "max_position_embeddings" in text:
            text = text.replace('"max_position_embeddings": 4096', '"max_position_embeddings": 32768')
            made.joinpath(file.name).write_text(text)
        elif not made.joinpath(file.name).exists():
            made.joinpath(file.name).symlink_to(file)
    return made


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], output: IO[str]) -> None:
    ends_s = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > ends_s:
            process.kill()
            process.wait()
            raise AssertionError(f"the application did not come up:\n{_all_of(output)[-4000:]}")
        time.sleep(0.5)


def _all_of(output: IO[str]) -> str:
    """What a process that has ended wrote."""
    output.seek(0)
    return output.read()


def is_up() -> bool:
    try:
        return httpx.get(f"{BASE_URL}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def is_running() -> bool:
    return serve.status().applications["default"].status.value == "RUNNING"


async def until(
    condition: Callable[[], Awaitable[bool]],
    what: str,
    patience_s: float = PATIENCE_S,
    seen: Callable[[], str] = lambda: "",
) -> None:
    """Waits for a condition that must come. `seen`: what there is in its place, for one that does not."""
    ends_s = time.monotonic() + patience_s
    while not await condition():
        assert time.monotonic() < ends_s, f"{what} within {patience_s} s{seen()}"
        await asyncio.sleep(0.1)


async def scrape() -> str:
    """What was counted until now: for who asks often, `/metrics` may give a scrape that was taken before."""
    asked_s, text = time.time(), ""
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60, headers=AUTHORIZED) as client:

        async def is_of_now() -> bool:
            nonlocal text
            answer = await client.get("/metrics")
            assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
            text = answer.text
            return totals(text)[("scrape_timestamp_seconds",)] > asked_s

        await until(is_of_now, "a scrape is taken")
    return text


async def whole_scrape() -> str:
    """Once every replica answers: those that have just started, or have much to do, may take longer than it waits."""
    text = ""

    async def nothing_is_missing() -> bool:
        nonlocal text
        text = await scrape()
        return not any(value for (name, *_), value in totals(text).items() if name == "scrape_missing")

    await until(nothing_is_missing, "every replica answers a scrape")
    return text


def request_for(
    kind: str, request_id: str, *, question: str = "Hello world, describe it.", voice: str = "Chelsie", seed: int = 0
) -> OmniRequest:
    audios, images = media(kind)
    return OmniRequest(
        request_id,
        prompt_text(kind, question),
        Media(tuple(audios), tuple(images)),
        voice=voice,
        seed=seed,
        sampling={"thinker": {"max_tokens": 16}, "talker": {"max_tokens": 60}},
    )


async def work(served: ServedApp) -> list[tuple[int, int | None]]:
    """Of the stages, in their order: requests that each has had, and steps of its engine."""
    return [(status["requests"], status["engine"].get("steps")) for status in await served.statuses()]
