"""The pages' examples run as they are against the tests' application: programs, curl, bodies, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet
import pytest
import ray

from omni_cluster.openai_api.audio import wav_bytes
from tests.commands import lines_of
from tests.openai_api.films import video_file
from tests.pages import ROOT, Block, blocks_of
from tests.served.app import ServedApp, until
from tests.server.bad_inputs import png

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "preset:tiny",
    "messages": [{"role": "user", "content": "Hello world."}],
    "max_tokens": 8,
}
TONE = wav_bytes(np.sin(np.arange(16_000) / 9).astype(np.float32), 16_000)
SAMPLE_RATE_HZ = 24_000
SOUND = ROOT / "docs" / "sound"
"""Files that a page has for its readers to play, and the command that makes them."""


def run(*command: str, folder: Path, **variables: str) -> str:
    """As a reader does, in a folder of their own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def as_served(text: str) -> str:
    """The pages ask the default; what is compared here is the answer of the tests' checkpoint."""
    return text.replace("preset:toy", "preset:tiny")


def run_program(code: str, folder: Path) -> str:
    (folder / "example.py").write_text(as_served(code))
    return run(sys.executable, "example.py", folder=folder, RAY_AUTH_MODE="token")


@pytest.mark.parametrize("block", blocks_of("openai"), ids=str)
def test_a_client_s_program_runs(served: ServedApp, block: Block, tmp_path: Path) -> None:
    assert run_program(block.text, tmp_path).strip()
    if "answer.wav" in block.text:
        with wave.open(str(tmp_path / "answer.wav")) as file:
            assert file.getframerate() == SAMPLE_RATE_HZ and file.getnframes() > 0


def samples(file: Path) -> int:
    with av.open(str(file)) as opened:
        return sum(frame.samples for frame in opened.decode(audio=0))


def curl_commands() -> list[str]:
    lines = [line for block in blocks_of("commands") for line in lines_of(block.text)]
    return [line for line in lines if line.startswith("curl ")]


@pytest.mark.parametrize("command", curl_commands())
def test_a_curl_command_is_answered(served: ServedApp, command: str, tmp_path: Path) -> None:
    (tmp_path / "question.wav").write_bytes(TONE)
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    printed = run("bash", "-c", as_served(command), folder=tmp_path, CURL_HOME=str(tmp_path))
    written = re.findall(r"-o (\S+)", command)
    assert printed or all((tmp_path / name).stat().st_size for name in written)
    for name in written:
        assert not (SOUND / name).exists() or samples(tmp_path / name) > SAMPLE_RATE_HZ


@pytest.mark.parametrize("block", blocks_of("fields"), ids=str)
def test_fields_of_a_request_are_taken(served: ServedApp, block: Block) -> None:
    answer = served.client.post(CHAT, json=ASKED | json.loads(block.text))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("block", blocks_of("message"), ids=str)
def test_a_message_with_media_is_taken(served: ServedApp, block: Block) -> None:
    """The media are put in where the page says BASE64; nothing is fetched from elsewhere here."""
    film = "data:video/mp4;base64," + base64.b64encode(video_file()).decode()
    text = block.text.replace("https://example.com/a.mp4", film)
    text = text.replace('"data": "BASE64"', f'"data": "{base64.b64encode(TONE).decode()}"')
    text = text.replace("base64,BASE64", f"base64,{base64.b64encode(png()).decode()}")
    assert "BASE64" not in text
    answer = served.client.post(CHAT, json=ASKED | {"messages": [json.loads(text)]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("block", blocks_of("error"), ids=str)
def test_an_error_is_told_as_the_page_has_it(served: ServedApp, block: Block) -> None:
    answer = served.client.post(CHAT, json=ASKED | {"audio": {"voice": "Bob"}})
    assert (answer.status_code, answer.json()) == (400, json.loads(block.text))


def alike(line: str) -> str:
    """Without what differs from run to run: the stages' part of an id, and seconds."""
    return re.sub(r"\d+\.\d{3} s", "N s", re.sub(r"-[0-9a-f]{8}:", "-ID:", line))


@pytest.mark.parametrize("block", blocks_of("log"), ids=str)
async def test_the_log_has_the_lines_of_the_page(served: ServedApp, block: Block) -> None:
    exact = {"thinker": (16, 16), "talker": (48, 48)}
    lengths = {name: {"min_tokens": low, "max_tokens": high} for name, (low, high) in exact.items()}
    body = {**ASKED, "max_tokens": 16, "ignore_eos": True, "audio": {"format": "wav"}, "stage_sampling_params": lengths}
    answer = await asyncio.to_thread(served.client.post, CHAT, json=body, headers={"x-request-id": "find-me.1"})
    assert answer.status_code == 200, answer.text
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"

    def lines() -> list[str]:
        text = "".join(file.read_text() for file in logs.glob("replica_default_*.log"))
        return sorted(map(alike, re.findall(r"request find-me\.1.*", text)))

    async def all_are_there() -> bool:
        return len(lines()) >= len(block.text.splitlines())

    await until(all_are_there, "every log has the request")
    assert lines() == sorted(map(alike, block.text.splitlines()))


@pytest.mark.parametrize("block", blocks_of("socket"), ids=str)
def test_a_program_of_a_socket_runs(served: ServedApp, block: Block, tmp_path: Path) -> None:
    printed = run_program(block.text, tmp_path).splitlines()
    assert printed == ["0 Good morning.", "1 How are you?"]
    assert all(samples(tmp_path / f"sentence_{index}.wav") > 0 for index in range(2))


@pytest.mark.full
@pytest.mark.parametrize("block", blocks_of("handle"), ids=str)
def test_a_program_inside_the_cluster_runs(served: ServedApp, block: Block, tmp_path: Path) -> None:
    assert "array" in run_program(block.text, tmp_path)


@pytest.mark.full
def test_a_batch_runs(served: ServedApp, tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks_of("batch") if "answer_rows(" in block.text]
    questions = tmp_path / "questions"
    questions.mkdir()
    rows = [{"id": str(number), "messages": ASKED["messages"], "max_tokens": 4} for number in range(3)]
    (questions / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    run_program(code.replace("s3://bucket", str(tmp_path)), tmp_path)
    answers = pyarrow.parquet.read_table(tmp_path / "answers").to_pylist()
    assert sorted(answer["id"] for answer in answers) == ["0", "1", "2"]
    assert [answer["error"] for answer in answers] == [None] * 3
