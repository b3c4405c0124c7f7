"""Rows answered by a running application and by engines of a batch's own, and a batch that is killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import json
import sys
import tarfile
import wave
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.dataset
import pyarrow.parquet
import pytest
import ray.data
import uvicorn
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from omni_cluster.batch import (
    Application,
    ApplicationLost,
    BatchError,
    BatchLimits,
    Engines,
    answer_rows,
    write_parquet,
    write_webdataset,
)
from omni_cluster.serve_local import listening
from tests.configs import TINY_CONFIG
from tests.http_app import MODEL, STREAM_TOLERANCE
from tests.processes import command_line, running_after
from tests.served.app import BASE_URL, ROOT, ServedApp, until
from tests.server.bad_inputs import png

pytestmark = pytest.mark.full

LIMITS = BatchLimits(rows_at_once=4, rows_a_block=2)
LET_IN = 8
"""Requests of the batch that is killed; those that follow wait."""
BATCH_S = 400
"""Until a batch of its own has got on: a Ray starts for it."""
TEXT = {"type": "text", "text": "What is it?"}
SOUND = {"modalities": ["text", "audio"], "voice": "Ethan", "seed": 3}
Row = dict[str, Any]


def user(*parts: Row) -> list[Row]:
    return [{"role": "user", "content": list(parts)}]


def row(row_id: str, messages: list[Row], **fields: Any) -> Row:
    return {"id": row_id, "messages": messages, "max_tokens": 8} | fields


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = shown


def asked_directly(served: ServedApp, asked: Row) -> Row:
    body = {name: value for name, value in asked.items() if name not in ("id", "voice")} | {"model": MODEL}
    if "voice" in asked:
        body["audio"] = {"format": "wav", "voice": asked["voice"]}
    response = served.client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return response.json()  # type: ignore[no-any-return]


def samples(sound: bytes) -> NDArray[np.float32]:
    with wave.open(io.BytesIO(sound)) as reader:
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2").astype(np.float32) / 32768


def assert_same(answer: Row, direct: Row) -> None:
    message, usage = direct["choices"][0]["message"], direct["usage"]
    assert answer["error"] is None and answer["text"] == message["content"]
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert answer["audio_tokens"] == usage["completion_tokens_details"]["audio_tokens"]
    if "audio" not in message:
        assert answer["sound"] is None
        return
    sound = samples(base64.b64decode(message["audio"]["data"]))
    assert sound.size > 0
    np.testing.assert_allclose(samples(answer["sound"]), sound, atol=STREAM_TOLERANCE)


def test_rows_get_what_the_application_answers_and_bad_rows_their_errors(served: ServedApp, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    direct = {
        "text": asked_directly(served, row("text", user(TEXT))),
        "spoken": asked_directly(served, row("spoken", user(TEXT), **SOUND)),
        "path": asked_directly(served, row("path", user(image, TEXT), **SOUND)),
    }
    direct["bytes"] = direct["path"]
    rows = [
        row("text", user(TEXT)),
        row("spoken", user(TEXT), **SOUND),
        row("path", user({"type": "image", "path": str(tmp_path / "a.png")}, TEXT), **SOUND),
        row("bytes", user({"type": "image", "bytes": png()}, TEXT), **SOUND),
        row("role", [{"role": "nobody", "content": [TEXT]}]),
        row("missing", user({"type": "audio", "path": "/nowhere/a.wav"})),
    ]
    asked = answer_rows(ray.data.from_items(rows), Application(url=BASE_URL), LIMITS).materialize()
    answers = {answer["id"]: answer for answer in asked.take_all()}
    assert set(answers) == {each["id"] for each in rows}
    for row_id, said in direct.items():
        assert_same(answers[row_id], said)
    assert answers["role"]["error_code"] == "invalid_value" and "role" in answers["role"]["error"]
    assert answers["missing"]["error_code"] == "media_not_found" and answers["missing"]["text"] is None

    with pytest.raises(BatchError, match="resume=False"):
        write_parquet(asked, str(tmp_path / "parquet"))
    write_parquet(asked, str(tmp_path / "parquet"), resume=False)
    assert {each["id"]: each for each in read_parquet(tmp_path / "parquet")} == answers
    write_webdataset(asked, str(tmp_path / "tar"), resume=False)
    members = dict(members_of(tmp_path / "tar"))
    assert members["spoken.wav"] == answers["spoken"]["sound"]
    assert members["spoken.txt"].decode() == answers["spoken"]["text"]
    assert json.loads(members["role.json"])["error_code"] == "invalid_value" and "role.wav" not in members


def read_parquet(folder: Path) -> list[Row]:
    return pyarrow.dataset.dataset(folder).to_table().to_pylist()  # type: ignore[no-any-return]


def members_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()


@pytest.mark.usefixtures("served")
def test_rows_of_a_lost_application_are_not_written(tmp_path: Path) -> None:
    rows = ray.data.from_items([row("a", user(TEXT))])
    nobody = Application(url="http://127.0.0.1:9")
    with pytest.raises(ApplicationLost, match=r"took no request for 0\.1 s .*start the batch again"):
        write_parquet(answer_rows(rows, nobody, BatchLimits(patience_s=0.1)), str(tmp_path / "out"), resume=False)
    assert not list(tmp_path.rglob("*.parquet"))


def test_engines_of_its_own_say_what_the_application_says(served: ServedApp) -> None:
    rows = [row(str(i), user({"type": "text", "text": f"Count to {i}."})) for i in range(3)]
    rows.append(row("spoken", user(TEXT), **SOUND))
    bad = row("role", [{"role": "nobody", "content": [TEXT]}])
    asked = answer_rows(ray.data.from_items([*rows, bad]), Engines(config=TINY_CONFIG, num_cpus=0.1), LIMITS)
    answers = {answer["id"]: answer for answer in asked.take_all()}
    assert set(answers) == {each["id"] for each in [*rows, bad]}
    for each in rows:
        assert_same(answers[each["id"]], asked_directly(served, each))
    assert answers["role"]["error_code"] == "invalid_value" and answers["role"]["text"] is None
    assert not running_after(batch_processes(served), BATCH_S)


def batch_processes(served: ServedApp) -> list[psutil.Process]:
    """Those of batches: they end once nobody holds their batch any more.

    The error of a batch that was lost holds it until Python has collected them: that of another test may be there yet.
    """
    gc.collect()
    started = psutil.Process(served.process.pid).children(recursive=True)
    return [each for each in started if command_line(each).startswith("ray::MapWorker")]


class Gate:
    """Hands requests on to the application, and counts them by what they ask; after `opens_for` of them it is shut."""

    def __init__(self, http: httpx.AsyncClient, opens_for: int) -> None:
        self.asked: Counter[str] = Counter()
        self.held = 0
        self._http = http
        self._opens_for = opens_for
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body()
        if request.method == "POST":
            await self._count(json.loads(body)["messages"][0]["content"])
        said = await self._http.request(request.method, request.url.path, content=body, headers=JSON)
        response = Response(said.content, said.status_code, media_type=said.headers["content-type"])
        await response(scope, receive, send)

    async def _count(self, question: str) -> None:
        self.asked[question] += 1
        if self.asked.total() > self._opens_for:
            self.held += 1
            await self._open.wait()


JSON = {"content-type": "application/json"}


@asynccontextmanager
async def gate_to(url: str, opens_for: int) -> AsyncIterator[tuple[Gate, str]]:
    """A gate before the application, and its own address."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        gate = Gate(http, opens_for)
        server = uvicorn.Server(uvicorn.Config(gate, lifespan="off", log_level="error"))
        with listening("127.0.0.1", 0) as listener:
            serves = asyncio.create_task(server.serve(sockets=[listener]))
            yield gate, "http://{}:{}".format(*listener.getsockname())
            gate.open()
            server.should_exit = True
            await serves


@asynccontextmanager
async def batch(url: str, rows: Path, out: Path, times: int = 1) -> AsyncIterator[asyncio.subprocess.Process]:
    """A batch, done so many times, with a Ray of its own; if it still runs, both are killed, as by a host's death."""
    command = [sys.executable, "-m", "tests.served.batch_job", url, str(rows), str(out), str(times)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            await until(lambda: are_gone(children), "the killed batch's Ray is gone")


async def are_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def finished_ids(out: Path) -> set[str]:
    files = out.with_name(f"{out.name}.finished").glob("*.parquet")
    return {row_id for file in files if ".pending" not in file.name for row_id in ids_in(file)}


def ids_in(file: Path) -> list[str]:
    return pyarrow.parquet.read_table(file)["id"].to_pylist()  # type: ignore[no-any-return]


@pytest.mark.timeout(1200)
async def test_a_batch_that_is_killed_goes_on_without_asking_finished_rows_again(
    served: ServedApp, tmp_path: Path
) -> None:
    ids = [f"row-{i:02}" for i in range(16)]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text("".join(json.dumps(row(each, [{"role": "user", "content": each}])) + "\n" for each in ids))

    async def has_finished_some() -> bool:
        # All that can be: those that were let in, but for as many as wait for the others of their blocks.
        return gate.held > 0 and len(finished_ids(out)) >= LET_IN - LIMITS.rows_at_once

    async with gate_to(BASE_URL, opens_for=LET_IN) as (gate, url):
        async with batch(url, rows, out):
            await until(has_finished_some, "some rows are written and others wait", BATCH_S)
        finished = finished_ids(out)
        assert finished and finished < set(ids)
        gate.open()
        async with batch(url, rows, out, times=2) as going_on:  # the second one finds nothing to do
            assert await asyncio.wait_for(going_on.wait(), BATCH_S) == 0
    answers = read_parquet(out)
    assert sorted(answer["id"] for answer in answers) == ids
    assert all(answer["error"] is None and answer["text"] for answer in answers)
    assert set(gate.asked) == set(ids) and {gate.asked[each] for each in finished} == {1}
    assert gate.asked.total() <= len(ids) + LIMITS.rows_at_once + 2 * LIMITS.rows_a_block
