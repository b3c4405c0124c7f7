"""Variants change what their paths name, are refused before a server starts, and are asked what the base is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from omni_cluster.bench.errors import BenchError
from omni_cluster.config.loader import DEFAULT_CONFIG
from tests.pages import ROOT
from training.changes import Variant, read_variants, variant_of
from training.variants import configuration

BASE = yaml.safe_load(DEFAULT_CONFIG.read_text())


def test_a_path_begins_at_a_stage_or_at_the_file() -> None:
    changes = {
        "talker.engine_args.dtype": "bfloat16",
        "code2wav.advanced.options.num_steps": 4,
        "limits.max_ongoing_requests": 2,
        "advanced.api.default_modalities": ["text"],
        "asked.stream": False,
    }
    variant = Variant("all", changes)
    made = configuration(variant, BASE)
    _, talker, code2wav = made["stages"]
    assert (talker["engine_args"]["dtype"], code2wav["advanced"]["options"]["num_steps"]) == ("bfloat16", 4)
    assert code2wav["advanced"]["options"]["max_streams"] == 32
    assert made["limits"] == BASE["limits"] | {"max_ongoing_requests": 2}
    assert made["advanced"] == {"api": {"default_modalities": ["text"]}} and "asked" not in made
    assert yaml.safe_load(DEFAULT_CONFIG.read_text()) == BASE == Variant("base").of(BASE)


def test_a_path_that_leads_into_a_value_is_refused() -> None:
    with pytest.raises(BenchError, match="leads into dtype, which is no mapping; end the path there"):
        Variant("wrong", {"talker.engine_args.dtype.bits": 1}).of(BASE)


def test_variants_come_from_files_and_from_words(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("again: {}\nfour: {code2wav.advanced.options.num_steps: 4}\n")
    four = Variant("four", {"code2wav.advanced.options.num_steps": 4})
    assert read_variants(tmp_path / "two.yaml") == [Variant("again"), four]
    assert variant_of("four", "code2wav.advanced.options.num_steps=4") == four
    assert variant_of("whole", "asked.stream=false") == Variant("whole", {"asked.stream": False})
    with pytest.raises(BenchError, match=r"four has 'num_steps'; write PATH=VALUE"):
        variant_of("four", "num_steps")


@pytest.mark.parametrize("text", ["[1]", "four: 4", "a: [", ""])
def test_a_file_that_has_no_variants_is_told_of(tmp_path: Path, text: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(BenchError, match=r"wrong\.yaml (is no mapping|cannot be read)"):
        read_variants(tmp_path / "wrong.yaml")
    with pytest.raises(BenchError, match=r"none\.yaml cannot be read .*name a YAML file"):
        read_variants(tmp_path / "none.yaml")


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.variants", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_value_that_cannot_be_served_is_refused_before_a_server_starts() -> None:
    wrong = ran("--variant", "wrong", "code2wav.advanced.options.num_steps=1")
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert "num_steps is 1; it must be at least 2" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_base_itself_can_be_changed() -> None:
    wrong = ran("--set", "code2wav.advanced.options.num_steps=40")
    assert wrong.returncode == 1 and "num_steps is 40; " in wrong.stderr, wrong.stderr


def test_a_base_that_is_not_there_is_told_of() -> None:
    wrong = ran("--base", "none.yaml")
    assert wrong.returncode == 1 and wrong.stderr.startswith("none.yaml: the file cannot be read"), wrong.stderr


@pytest.mark.full
def test_variants_are_asked_what_the_base_is(tmp_path: Path) -> None:
    """One that does not start is told of, and the next one is asked."""
    out = tmp_path / "variants.json"
    full = ["full", "thinker.engine_args.kv_cache_memory_bytes=1"]
    whole = ["not streamed", "asked.stream=false"]
    made = ran(
        "--set",
        "thinker.engine_args.max_num_seqs=4",
        "--questions",
        "3",
        "--variant",
        *full,
        "--variant",
        *whole,
        "--out",
        str(out),
    )
    assert made.returncode == 0, made.stderr
    base, failed, other = json.loads(out.read_text())["variants"]
    assert base["pairs"] is None and base["figures"]["lost"] == other["figures"]["lost"] == 0
    assert failed["name"] == "full" and "the server ended as it started" in failed["error"]
    pairs = other["pairs"]
    assert pairs["same_text"] == pairs["same_length"] == 3 and pairs["like_db"] > 30
    assert "not streamed" in made.stdout
