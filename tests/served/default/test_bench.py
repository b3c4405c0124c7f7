"""`omni-cluster bench` on the served application, and what vLLM-Omni's benchmark sends and reads."""

from __future__ import annotations

import base64
import io
import itertools
import json
import wave
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.bench.result import read_result
from omni_cluster.cli import main
from tests.served.app import BASE_URL, STAGES, ServedApp

pytestmark = pytest.mark.full

CODES = 30
SAMPLES_A_CODE = 480
SHORT = f"--prompt-tokens 12 --text-tokens 6 --codec-tokens {CODES}"


@pytest.mark.parametrize("streamed", ["--stream", "--no-stream"])
def test_load_on_the_http_api(served: ServedApp, tmp_path: Path, streamed: str) -> None:
    cells = "--concurrency 1 2 --rate 50 --requests 4 --warmup 1"
    argv = f"bench --url {BASE_URL} {cells} {SHORT} {streamed} --out {tmp_path}"
    assert main(argv.split()) == 0
    result = read_result(tmp_path / "result.json")
    assert (result.target, result.model) == (BASE_URL, "preset:tiny")
    assert result.machine.role.startswith("the client")
    assert [cell.name for cell in result.cells] == ["closed 1", "closed 2", "open 50/s"]
    for cell in result.cells:
        assert (cell.requests, cell.errors) == (4, 0)
        assert cell.figures["text_tokens"].p50 == 6 and cell.figures["codec_tokens"].p50 == CODES
        assert cell.figures["audio_s"].p50 == CODES * 0.02
        assert cell.figures["prompt_tokens"].p50 > 12
        assert set(cell.stages) == set(STAGES)
        assert 0 < cell.figures["first_text_s"].p50 <= cell.figures["first_audio_s"].p50 <= cell.figures["jct_s"].p50
    assert (tmp_path / "result.png").stat().st_size > 0


def test_users_who_speak_come_back_with_all_that_was_said(served: ServedApp, tmp_path: Path) -> None:
    turns, users, least_tokens = 6, 2, 5
    cells = f"--rate 20 --requests {turns * users} --warmup 0 --turns {turns} --pause 0.05"
    spoken = f"--mix --mix-spoken 1 --mix-prompt {least_tokens} 10 --mix-sound 0.3 0.5"
    assert main(f"bench --url {BASE_URL} {cells} {spoken} --out {tmp_path}".split()) == 0
    (cell,) = read_result(tmp_path / "result.json").cells
    assert (cell.requests, cell.errors) == (turns * users, 0)
    assert cell.figures["opening_first_audio_s"].p50 > 0 and cell.figures["later_first_audio_s"].p50 > 0
    requests = [json.loads(line)["request"] for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for first in range(0, len(requests), turns):
        talked = requests[first : first + turns]
        assert [request["earlier_turns"] for request in talked] == list(range(turns))
        for before, behind in itertools.pairwise(talked):
            # The reply may be other tokens in a prompt than as they were sampled.
            assert before["reply"] and behind["prompt_tokens"] > before["prompt_tokens"] + least_tokens


def test_the_capacity_is_searched_with_requests_of_mixed_lengths(
    served: ServedApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = "--mix --mix-sound 0.2 0.6 --mix-prompt 5 30"
    search = "--find-capacity --capacity-between 8 8 --capacity-share 0.5 --seconds 1"
    assert main(f"bench --url {BASE_URL} {search} {mix} --out {tmp_path}".split()) == 0
    result = read_result(tmp_path / "result.json")
    (cell,) = result.cells
    assert (cell.name, cell.errors) == ("open 8/s", 0) and cell.requests >= 8
    assert result.capacity is not None and cell.gapless_share is not None
    assert result.capacity.passed_per_s == (8 if cell.gapless_share >= 0.5 else None)
    assert str(result.capacity) in capsys.readouterr().out
    assert cell.figures["first_audio_s"].p50 <= cell.figures["first_audible_s"].p50 <= cell.figures["jct_s"].p50 + 0.6
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert {line["asked"]["spoken_s"] > 0 for line in lines} == {True, False}
    for line in lines:
        asked, request = line["asked"], line["request"]
        assert (request["text_tokens"], request["codec_tokens"]) == (asked["text_tokens"], asked["codec_tokens"])
        assert request["prompt_tokens"] > asked["prompt_tokens"]


def test_requests_that_fail_are_counted_with_the_server_s_sentence(
    served: ServedApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"bench --url {BASE_URL} --concurrency 2 --requests 2 --voice Nobody {SHORT} --out {tmp_path}"
    assert main(argv.split()) == 2
    printed = capsys.readouterr()
    assert "2 of 2 requests failed" in printed.out and "the voices are Chelsie, Ethan" in printed.out
    assert "no request of closed 2 succeeded" in printed.err
    assert read_result(tmp_path / "result.json").cells[0].errors == 2


def test_a_run_is_compared_with_itself(served: ServedApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"bench --url {BASE_URL} --concurrency 1 --requests 1 {SHORT} --out {tmp_path}"
    assert main(argv.split()) == 0
    capsys.readouterr()
    assert main(["bench", "--compare", str(tmp_path / "result.json"), str(tmp_path / "result.json")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "closed 1" in line]
    assert len(rows) == 12 and all("+0.000" in row for row in rows)
    assert all("+0.0 " in row or "stall" in row for row in rows)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_params_list": [{}]}, "one a stage"),
        ({"sampling_params_list": [None, {"best_of": 2}, None]}, "best_of is 2, which is not supported"),
        ({"min_tokens": 9, "max_tokens": 8}, "at most its max_tokens"),
    ],
)
def test_sampling_that_cannot_be_is_a_400(served: ServedApp, fields: dict[str, Any], words: str) -> None:
    body = {"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_min_tokens_and_ignore_eos_fix_the_length_of_the_text(served: ServedApp) -> None:
    body = {"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    answer = served.client.post("/v1/chat/completions", json=body | {"min_tokens": 33, "max_tokens": 33}).json()
    assert answer["usage"]["completion_tokens"] == 33


def test_vllm_omni_s_benchmark_gets_all_it_counts(served: ServedApp) -> None:
    """Sends and reads as `vllm bench serve --omni --backend openai-chat-omni --ignore-eos` of vllm-omni 0.30.0 does.

    Its `async_request_openai_chat_omni_completions` tells text from sound by `modality`, takes sound from
    `delta.audio.data` where `delta.content` is empty, and opens each piece as a WAV file of its own.
    """
    body = {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "time year people"}]}],
        "temperature": 0.0,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "modalities": ["text", "audio"],
        "return_stage_metrics": True,
    }
    headers = {"Authorization": "Bearer None", "x-request-id": "bench-0"}
    response = served.client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    text, pcm, usage = "", b"", {}
    for message in response.text.split("\n\n"):
        chunk = message.removeprefix("data: ")
        if not chunk or chunk == "[DONE]":
            continue
        data = json.loads(chunk)
        usage = data.get("usage") or usage
        for choice in data["choices"][:1]:
            delta = choice.get("delta") or {}
            content = delta.get("content")
            if not content and isinstance(delta.get("audio"), dict):
                content = delta["audio"].get("data")
            if content and data.get("modality") == "text":
                text += content
            elif content and data.get("modality") == "audio":
                with wave.open(io.BytesIO(base64.b64decode(content)), "rb") as reader:
                    assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (1, 2, 24_000)
                    pcm += reader.readframes(reader.getnframes())
    assert text
    codes = usage["completion_tokens_details"]["audio_tokens"]
    assert usage["completion_tokens"] == 8 + codes and usage["prompt_tokens"] > 3
    assert len(pcm) == 2 * SAMPLES_A_CODE * codes > 0
