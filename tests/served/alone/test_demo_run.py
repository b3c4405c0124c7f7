"""`omni-cluster demo` as its users run it: what it prints and writes, and that nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from omni_cluster.demo import PICTURE_QUESTION
from tests.served.app import PATIENCE_S, ROOT, STAGES

pytestmark = pytest.mark.full

PORT = 8111
DEMO_S = 500
LOOK_S = 0.2


@dataclass(frozen=True)
class EndedDemo:
    """A demo that has ended. `processes`: all that were seen below it while it ran, with their programs' names."""

    exit_code: int
    printed: str
    complaint: str
    out: Path
    processes: dict[psutil.Process, str]


def nothing(process: psutil.Popen, printed: str) -> None:
    pass


def run_demo(folder: Path, *arguments: str, on_look: Callable[[psutil.Popen, str], None] = nothing) -> EndedDemo:
    """Output goes to files: a pipe that a surviving child holds would never end.

    `on_look`: gets the process and what it has printed, time and again until it has ended.
    """
    out, printed, complaint = folder / "out", folder / "stdout", folder / "stderr"
    command = [str(Path(sys.executable).parent / "omni-cluster"), "demo", "--port", str(PORT), "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with printed.open("wb") as stdout, complaint.open("wb") as stderr:
        process = psutil.Popen([*command, *arguments], cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
        processes = watched(process, lambda: on_look(process, text_of(printed)))
    return EndedDemo(process.returncode, text_of(printed), text_of(complaint), out, processes)


def watched(process: psutil.Popen, look: Callable[[], None]) -> dict[psutil.Process, str]:
    """Waits for the end; returns all processes that were seen below. One that takes too long is ended with them."""
    seen: dict[psutil.Process, str] = {}
    ends_s = time.monotonic() + DEMO_S
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            seen |= {child: child.name() for child in process.children(recursive=True)}
        if time.monotonic() > ends_s:
            for each in (process, *seen):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        with suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
            process.wait(LOOK_S)
        look()
    return seen


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def is_gone(process: psutil.Process) -> bool:
    """A dead one whose new parent has not read its exit code yet is gone too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> EndedDemo:
    """One run of the embedded default: a minute or two."""
    return run_demo(tmp_path_factory.mktemp("demo"))


def test_the_demo_ends_well(demo: EndedDemo) -> None:
    assert demo.exit_code == 0, f"{demo.printed}\n{demo.complaint}"


@pytest.mark.parametrize("name", ["answer.wav", "picture.wav"])
def test_the_sound_is_a_wav_of_24_khz_mono(demo: EndedDemo, name: str) -> None:
    with wave.open(str(demo.out / name)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 0.5 * file.getframerate()
        assert any(file.readframes(file.getnframes()))


def test_what_is_heard_and_said_is_printed(demo: EndedDemo) -> None:
    question = r"> \[question\.wav\]\ntranscript: (.+)\nanswer: (.+)\nsound: .+answer\.wav"
    picture = rf"> \[picture\.png\] {re.escape(PICTURE_QUESTION)}\nanswer: (.+)\nsound: .+picture\.wav"
    dialogue = re.search(rf"{question}.*{picture}", demo.printed, re.DOTALL)
    assert dialogue is not None, demo.printed
    assert all(text.strip() for text in dialogue.groups())


@pytest.mark.parametrize("stage", STAGES)
def test_the_times_of_each_stage_are_printed(demo: EndedDemo, stage: str) -> None:
    row = re.search(rf"{stage}\W+(\d+\.\d+)\W+(\d+\.\d+)\W+(\d+)", demo.printed)
    assert row is not None, demo.printed
    assert 0 < float(row[1]) <= float(row[2])


def test_nothing_is_complained_about(demo: EndedDemo) -> None:
    """Neither by libraries nor by Ray, the end included."""
    said = demo.printed + demo.complaint
    for mark in ("raylet", "graceful_shutdown", "Traceback", "WARNING", "ERROR", "*** SIG"):
        assert mark not in said, said


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_says_what_it_does_until_it_is_there(demo: EndedDemo, stage: str) -> None:
    lines = re.findall(rf"^ *\d+\.\d s  {stage}: (.+)$", demo.printed, re.MULTILINE)
    assert len(lines) > 2 and lines[-1] == "ready", demo.printed
    assert any(line.startswith("imports its libraries") for line in lines), demo.printed


def test_it_says_where_the_page_is(demo: EndedDemo) -> None:
    assert f"With --keep it stays up, and http://127.0.0.1:{PORT}/ is a page" in demo.printed


def test_a_demo_that_is_kept_serves_its_page_until_ctrl_c(tmp_path: Path) -> None:
    pages: list[httpx.Response] = []

    def look(process: psutil.Popen, printed: str) -> None:
        if not pages and "Talk to it at " in printed:
            (address,) = re.findall(r"Talk to it at (\S+)", printed)
            pages.append(httpx.get(address, trust_env=False))
            process.send_signal(signal.SIGINT)

    demo = run_demo(tmp_path, "--keep", on_look=look)
    assert [page.status_code for page in pages] == [200] and "<title>omni_cluster" in pages[0].text
    assert demo.exit_code == 130 and "Traceback" not in demo.complaint, demo.complaint
    test_nothing_of_the_demo_stays(demo)


def test_nothing_of_the_demo_stays(demo: EndedDemo) -> None:
    # The engines are there too: a stage has a process each at least, and Ray some of its own.
    assert len(demo.processes) > len(STAGES)
    ends_s = time.monotonic() + PATIENCE_S
    while left := [process for process in demo.processes if not is_gone(process)]:
        assert time.monotonic() < ends_s, f"{left} within {PATIENCE_S} s"
        psutil.wait_procs(left, timeout=LOOK_S)
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", PORT)) != 0


STARTED = ("gcs_server", "raylet", "ray::", "VLLM", "python", "serve")
TINY = (ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TINY.replace("num_replicas: 1", "num_replicas: none", 1), "num_replicas"),
        (TINY.replace("model_stage: talker", "model_stage: singer"), "singer"),
        (TINY.replace("engine_input_source: [0]", "engine_input_source: []"), "engine_input_source"),
        (None, "nowhere.yaml"),
    ],
    ids=["wrong value", "no such stage", "no source", "no such file"],
)
def test_a_bad_configuration_is_one_sentence_and_starts_nothing(config: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / ("config.yaml" if config else "nowhere.yaml")
    if config:
        path.write_text(config)
    demo = run_demo(tmp_path, "--config", str(path))
    assert demo.exit_code == 2
    assert demo.complaint.startswith("omni-cluster: ") and demo.complaint.count("\n") == 1
    assert words in demo.complaint
    # Libraries run small programs while they are imported, to look for others of theirs or at the processor.
    assert not demo.printed and not any(name.startswith(STARTED) for name in demo.processes.values())
    assert not (demo.out / "answer.wav").exists()
