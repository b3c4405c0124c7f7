"""`omni-cluster bench --offline` on the embedded default, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_cluster.bench.result import read_result
from omni_cluster.cli import main

pytestmark = pytest.mark.full

CODES = 30
SAMPLES_A_CODE = 480


def test_the_engines_alone(tmp_path: Path) -> None:
    mix = f"--mix --mix-sound {CODES * 0.02} {CODES * 0.02} --mix-prompt 12 40 --seed 3 --turns 2 --pause 0.1"
    argv = f"bench --offline --concurrency 1 2 --rate 50 --burst --requests 4 --warmup 1 {mix} --out {tmp_path}"
    assert main(argv.split()) == 0
    result = read_result(tmp_path / "result.json")
    assert result.target == "offline" and result.model == "preset:toy"
    assert [cell.name for cell in result.cells] == ["burst 1", "burst 2", "open 50/s"]
    for cell in result.cells:
        assert (cell.requests, cell.errors) == (4, 0)
        assert cell.figures["text_tokens"].p50 == round(CODES / 8) and cell.figures["codec_tokens"].p50 == CODES
        assert cell.figures["audio_s"].p50 == CODES * 0.02
        assert cell.figures["prompt_tokens"].p50 > 12
        assert set(cell.stages) == {"thinker", "talker", "code2wav"}
        assert 0 < cell.figures["first_text_s"].p50 < cell.figures["first_audio_s"].p50 <= cell.figures["jct_s"].p50
        assert (
            cell.figures["first_audio_s"].p50 <= cell.figures["first_audible_s"].p50 and cell.gapless_share is not None
        )
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["asked"]["spoken_s"] > 0 for line in lines] == [False, True, True, True] * 3
    assert all(line["request"]["prompt_tokens"] > line["asked"]["prompt_tokens"] for line in lines)
    requests = [line["request"] for line in lines]
    assert len({request["number"] for request in requests}) == 12
    assert [request["earlier_turns"] for request in requests] == [0, 1] * 6
    for before, behind in zip(requests[::2], requests[1::2], strict=True):
        assert before["reply"] and behind["prompt_tokens"] > before["prompt_tokens"] + before["text_tokens"]
    assert {sum(a["samples"] for a in request["audio"]) for request in requests} == {CODES * SAMPLES_A_CODE}
    assert (tmp_path / "result.png").stat().st_size > 0
