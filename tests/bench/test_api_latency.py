"""What the API adds: the subtraction, the quantiles, and the parts as the API itself runs them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks import api_parts
from benchmarks.api_latency import ApiLatency, checked, main, parser, print_latency, wide_open
from benchmarks.api_parts import MIN_REPETITIONS, measured_parts, noise, part, reader, served
from omni_cluster.bench.compare import differences
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import chat_body
from omni_cluster.bench.load import Load
from omni_cluster.bench.result import FILE_NAME
from omni_cluster.bench.stats import cell_of
from omni_cluster.bench.table import wide_console
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.chat import ChatRequest
from omni_cluster.server.answers import StreamedSound
from tests.bench.records import record, result
from tests.cluster.clock import Clock

TINY = Path(__file__).parents[2] / "stage_configs" / "qwen2_5_omni_tiny.yaml"
LOAD = Load(prompt_tokens=12, text_tokens=6, codec_tokens=30)


@pytest.fixture(scope="module")
def bound() -> BoundPipeline:
    return bind(load_config(TINY, known_families=known_families()))


def latency(slower: float) -> ApiLatency:
    """HTTP `slower` times as slow as the engines, which take 0.1 s to text, 1 s to sound and 4 s in all."""
    http = result([cell_of("burst", 4, [record(n, slower) for n in range(4)], 8.0)], target="http://server")
    offline = result([cell_of("burst", 4, [record(n) for n in range(4)], 8.0)])
    added = tuple(differences(http, offline))
    return ApiLatency("now", "it", "a note", http.machine, http.load, http, offline, added, ())


def test_what_is_added_is_http_less_the_engines() -> None:
    added = {each.figure: each for each in latency(1.5).added}
    for figure, milliseconds in {"first text": 50.0, "first audio": 500.0, "JCT": 2000.0}.items():
        for percentile in ("p50", "p99"):
            assert added[f"{figure} {percentile}"].more == pytest.approx(milliseconds)
            assert added[f"{figure} {percentile}"].more_percent == pytest.approx(50.0)


def test_the_table_has_both_the_difference_and_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    print_latency(latency(1.5), wide_console())
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "first audio p99" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "burst 4", "first audio p99", "ms", "1500.000", "1000.000", "+500.000", "+50.0",
    ]  # fmt: skip
    assert "a note" in printed


def test_a_request_that_failed_ends_the_run() -> None:
    cell = cell_of("burst", 2, [record(0), record(1, error="no.")], 8.0)
    with pytest.raises(BenchError, match=r"1 of 2 requests of burst 2 failed: no\."):
        checked(cell, "offline")


def test_the_door_is_as_wide_as_the_largest_burst(tmp_path: Path) -> None:
    raised = load_config(wide_open(TINY, 64, tmp_path), known_families=known_families())
    given = load_config(TINY, known_families=known_families())
    assert raised.limits.max_ongoing_requests == 64 > given.limits.max_ongoing_requests
    assert raised.stages == given.stages
    kept = load_config(wide_open(TINY, 2, tmp_path), known_families=known_families())
    assert kept.limits.max_ongoing_requests == given.limits.max_ongoing_requests


def test_quantiles_are_of_the_action_alone_and_leave_the_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    released, clock = [], Clock()
    monkeypatch.setattr(api_parts, "time", SimpleNamespace(perf_counter=clock))

    def action(milliseconds: float) -> float:
        clock.now_s += milliseconds / 1e3
        return milliseconds

    def release(made: float) -> None:
        released.append(made)
        action(50.0)

    made = part("it", action, [200.0, 1.0, 1.0, 1.0, 20.0], release)
    assert released == [200.0, 1.0, 1.0, 1.0, 20.0]
    assert (made.repetitions, made.unit) == (4, "ms")
    assert made.p50 == pytest.approx(1.0) and 15.0 < made.p99 < 20.1


def test_what_is_read_is_what_the_client_sends(bound: BoundPipeline) -> None:
    body = chat_body(served(bound), LOAD, 3)
    chat = reader(bound)(json.dumps(body).encode())
    (message,) = chat.messages
    assert message["content"] == [{"type": "text", "text": LOAD.message(3)}]
    assert chat.audio_format == "pcm16" and chat.stream
    asked = {name: entry.given() for name, entry in chat.named_sampling.items()}
    assert asked == LOAD.sampling(3, bound.family.makers())


def test_the_sound_has_its_length_in_every_format() -> None:
    sound = StreamedSound("pcm16")
    assert len(sound.push(noise(1.0)) + sound.flush()) == 2 * 24_000
    lossless = StreamedSound("flac")
    assert len(lossless.push(noise(1.0)) + lossless.flush()) > 24_000  # noise is hardly compressed
    lossless.close()


def test_the_parts_are_measured_on_the_real_functions(bound: BoundPipeline) -> None:
    parts = {each.name: each for each in measured_parts(bound, LOAD, repetitions=20)}
    formats = ("pcm16", "wav", "flac", "mp3", "opus")
    of_a_request = ("parse and check", "sampling of each stage", "render", "SSE event of a token's text")
    assert set(parts) >= {*of_a_request, *formats, *(f"{each}, first 0.24 s" for each in formats)}
    assert {parts[each].unit for each in formats} == {"ms/s of sound"}
    assert all(0 < each.p50 <= each.p99 and each.repetitions == 20 for each in parts.values())
    assert parts["mp3"].p50 > parts["pcm16"].p50


def test_what_is_measured_is_as_long_as_the_load_says(bound: BoundPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a longer prompt costs more is too little to be told from a busy machine's time, so it is counted."""
    measured: list[bytes] = []

    def recording(bound: BoundPipeline) -> Callable[[bytes], ChatRequest]:
        read = reader(bound)

        def counted(body: bytes) -> ChatRequest:
            measured.append(body)
            return read(body)

        return counted

    monkeypatch.setattr(api_parts, "reader", recording)
    measured_parts(bound, dataclasses.replace(LOAD, prompt_tokens=10_000), repetitions=3)
    texts = [json.loads(body)["messages"][0]["content"] for body in measured]
    assert len(texts) == 2 * 4  # made into requests, and then timed; the first of them warms up
    assert {len(text.split()) for text in texts} == {10_000}


@pytest.mark.full
def test_parts_only_writes_the_parts_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", str(TINY), "--out", str(tmp_path / "new"), "--parts-only"]
    assert main(argv) == 0
    written = msgspec.json.decode((tmp_path / "new" / FILE_NAME).read_bytes(), type=ApiLatency)
    assert written.http is None and written.offline is None and written.added == ()
    assert {each.repetitions for each in written.parts} == {MIN_REPETITIONS}
    assert "parse and check" in capsys.readouterr().out
    assert main(argv) == 2
    assert "earlier run" in capsys.readouterr().err


def test_too_few_repetitions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", "x", "--out", "y", "--repetitions", str(MIN_REPETITIONS - 1)])
    assert "at least 200" in capsys.readouterr().err
