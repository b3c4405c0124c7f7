from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from omni_cluster.cli import main
from omni_cluster.config.loader import DEFAULT_CONFIG
from omni_cluster.models.registry import known_families
from tests.configs import TINY_CONFIG
from tests.pages import ROOT


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("omni-cluster: ")
    return line.removeprefix("omni-cluster: ")


def config_with(tmp_path: Path, old: str, new: str) -> str:
    text = TINY_CONFIG.read_text()
    assert old in text
    path = tmp_path / "changed.yaml"
    path.write_text(text.replace(old, new, 1))
    return str(path)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["demo", "--help"],
        ["check", "--help"],
        ["make-checkpoint", "--help"],
        ["bench", "--help"],
        ["serve", "--help"],
        ["warm", "--help"],
        ["plan", "--help"],
        ["chat", "--help"],
        ["top", "--help"],
    ],
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom omni_cluster.cli import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'vllm', 'ray', 'numpy', 'transformers', 'matplotlib', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: omni-cluster")
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["demo", "serve", "check", "warm", "bench"])
def test_help_names_the_configuration_that_is_the_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    assert DEFAULT_CONFIG.stem.endswith("_toy") and "(default: the trained toy's, which runs on a CPU)" in helped


def test_the_version_is_that_of_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"omni-cluster {metadata.version('omni-cluster')}\n")


def test_warm_of_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = config_with(tmp_path, "model: preset:tiny", f"cache_dir: {tmp_path}/file/kept\nmodel: preset:tiny")
    assert main(["warm", config]) == 2
    assert one_sentence(capsys).startswith(f"cache_dir is '{tmp_path}/file/kept', where nothing can be written")


def test_serve_is_for_this_process_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert one_sentence(capsys).startswith("serve needs --local; on a cluster, Ray serves: serve run deployments:app")


def test_module_is_the_command() -> None:
    argv = [sys.executable, "-m", "omni_cluster", "nonsense"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("omni-cluster: ") and "nonsense" in done.stderr


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["check", "--frobnicate"], "--frobnicate"),
        (["make-checkpoint", "out"], "--preset"),
        (["demo", "--port", "0"], "'0'"),
        (["demo", "--port", "65536"], "65536"),
        (["demo", "--port", "http"], "'http'"),
        (["top", "--every", "0"], "'0'"),
        (["bench", "--concurrency", "0"], "'0'"),
        (["bench", "--concurrency", "four"], "'four'"),
        (["bench", "--rate", "-1"], "'-1'"),
        (["bench", "--rate", "inf"], "'inf'"),
        (["bench", "--requests", "1.5"], "'1.5'"),
        (["bench", "--warmup", "-1"], "'-1'"),
        (["bench", "--config", "x.yaml"], "--offline"),
        (["bench", "--model", "dir"], "--offline"),
        (["bench", "--burst", "--rate", "1"], "--burst"),
        (["bench", "--compare", "a.json"], "--compare"),
        (["bench", "--seconds", "60"], "--seconds is for --rate and --find-capacity; add --rate or --find-capacity"),
        (["bench", "--rate", "1", "--seconds", "60", "--requests", "9"], "--seconds does not go with --requests"),
        (["bench", "--rate", "1", "--seconds", "0"], "'0'"),
        (["bench", "--find-capacity", "--rate", "1"], "--find-capacity does not go with --rate"),
        (["bench", "--find-capacity", "--concurrency", "1"], "--find-capacity does not go with --concurrency"),
        (["bench", "--find-capacity", "--requests", "1"], "--find-capacity does not go with --requests"),
        (["bench", "--find-capacity", "--capacity-between", "2", "1"], "is 2 1; name the lower one first"),
        (["bench", "--find-capacity", "--capacity-share", "1.5"], "'1.5' is no share"),
        (["bench", "--find-capacity", "--capacity-precision", "0"], "'0' is no precision"),
        (["bench", "--capacity-share", "0.9"], "add --find-capacity"),
        (["bench", "--mix", "--codec-tokens", "100"], "--mix does not go with --codec-tokens"),
        (["bench", "--mix-spoken", "0"], "--mix-spoken is for --mix; add --mix"),
        (["bench", "--mix", "--mix-sound", "20", "2"], "--mix-sound is 20 2; name the lower one first"),
        (["bench", "--mix", "--mix-prompt", "0", "2"], "'0' is no whole number from 1"),
        (["bench", "--mix", "--mix-spoken", "half"], "'half' is no share"),
        (["bench", "--turns", "0"], "'0' is no whole number from 1"),
        (["bench", "--pause", "2"], "--pause is for --turns; add --turns, or leave it out"),
        (["bench", "--turns", "2", "--pause", "0"], "'0' is no number above 0"),
        (["bench", "--find-capacity", "--turns", "2"], "--find-capacity does not go with --turns"),
    ],
)
def test_bad_command_line_is_one_sentence(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert named in one_sentence(capsys)


def test_check_prints_the_plan_of_the_embedded_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "transfers: thinker -> talker, talker -> code2wav" in printed.out
    assert printed.out.endswith("total GPUs: 0\n")


def test_check_prints_the_plan_of_the_config_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY_CONFIG.parent / "qwen2_5_omni.yaml")]) == 0
    assert "total GPUs: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("max_prompt_tokens", "max_promt_tokens", "max_prompt_tokens"),
        ("num_gpus: 0", "num_gpus: many", "'many'"),
        ("model_stage: talker", "model_stage: stalker", "'stalker'"),
        ("family: qwen2_5_omni", "family: qwen", "'qwen'"),
        ("limits:", "limits: [", "line"),
    ],
)
def test_check_of_a_bad_config_is_one_sentence(
    old: str, new: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", config_with(tmp_path, old, new)]) == 2
    assert named in one_sentence(capsys)


def test_check_of_a_config_that_is_not_there_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in one_sentence(capsys)


def test_a_name_with_a_line_break_is_still_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "two\nlines.yaml")]) == 2
    assert "two lines.yaml" in one_sentence(capsys)


def test_demo_with_a_bad_config_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = ["demo", "--out", str(out), "--config", config_with(tmp_path, "num_gpus: 0", "num_gpus: -1")]
    assert main(argv) == 2
    assert "num_gpus" in one_sentence(capsys)
    assert not out.exists()


def test_demo_that_cannot_write_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    assert str(tmp_path / "file" / "out") in one_sentence(capsys)


def test_make_checkpoint_writes_one_that_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made"
    assert main(["make-checkpoint", "--preset", "tiny", "--device", "cpu", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    assert (out / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--preset", "huge"], "'huge'"),
        (["--preset", "tiny", "--device", "abacus"], "'abacus'"),
        (["--preset", "tiny", "--family", "nobody"], "'nobody'"),
    ],
)
def test_make_checkpoint_refuses_in_one_sentence(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    assert main(["make-checkpoint", *options, str(out)]) == 2
    assert named in one_sentence(capsys)
    assert not out.exists()


def test_checkpoints_are_made_and_counted_without_a_word_of_a_library(tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    for arguments in (
        ["make-checkpoint", "--family", "qwen3_omni", "--preset", "tiny", made],
        ["check", "stage_configs/qwen3_omni_one_gpu.yaml", "--card-gib", "139", "--model", made],
    ):
        done = subprocess.run([sys.executable, "-m", "omni_cluster", *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_the_page_has_each_preset_of_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/use/commands.md").read_text()
    (told,) = re.findall(r"`omni-cluster make-checkpoint --preset (\S+)", page)
    presets = set[str]()
    for family in known_families():
        assert main(["make-checkpoint", "--family", family, "--preset", "none", str(tmp_path / "out")]) == 2
        for names in re.findall(r"use one of (.*)", capsys.readouterr().err):
            presets |= set(names.split(", "))
    assert "tiny" in presets and presets == set(told.split("\\|"))


def test_make_checkpoint_never_writes_over_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["make-checkpoint", "--preset", "tiny", str(tmp_path)]) == 2
    assert str(tmp_path) in one_sentence(capsys)
    assert (tmp_path / "kept").read_text() == "mine"


def test_bench_of_a_server_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]) == 2
    assert "http://127.0.0.1:9" in one_sentence(capsys)


def test_bench_offline_with_a_bad_config_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, "num_gpus: 0", "num_gpus: -1")
    assert main(["bench", "--offline", "--config", config, "--out", str(tmp_path / "out")]) == 2
    assert "num_gpus" in one_sentence(capsys)


def test_bench_that_cannot_write_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "--out", str(tmp_path / "file" / "out")]) == 2
    assert str(tmp_path / "file" / "out") in one_sentence(capsys)


def test_bench_compares_no_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "a.json" in one_sentence(capsys)


def test_check_prints_the_memory_of_a_card_by_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, "    num_gpus: 0  ", "    num_gpus: 1  ")
    assert main(["check", config, "--card-gib", "8"]) == 0
    plan, _, table = capsys.readouterr().out.partition("\n\ncard ")
    assert "total GPUs: 1" in plan
    assert "KV cache" in table and "each card of thinker  usable" in table


def test_check_of_a_card_that_is_too_small_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, "    num_gpus: 0  ", "    num_gpus: 1  ")
    assert main(["check", config, "--card-gib", "2"]) == 2
    assert "stage 0 (thinker) does not fit on each card of thinker of 1.0 GiB" in one_sentence(capsys)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--card-gib", "0"], "'0'"),
        (["--model", "x"], "add --card-gib"),
        (["--card-gib", "80", "--model", "nobody/nothing"], "'nobody/nothing', which is not on this host"),
    ],
)
def test_check_refuses_cards_in_one_sentence(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(TINY_CONFIG.parent / "qwen2_5_omni.yaml"), *options]) == 2
    assert named in one_sentence(capsys)
