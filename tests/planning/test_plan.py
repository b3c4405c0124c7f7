"""`omni-cluster plan`: cards for streams, streams of cards, and a configuration that `check` accepts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from omni_cluster.cli import main
from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.models.registry import known_families
from omni_cluster.planning.measured import Measured, measured_of
from omni_cluster.planning.plan import ClusterPlan, Range, Target, plan_cluster
from omni_cluster.types.errors import ConfigError

MEASURED = measured_of(known_families()[0])
H100 = measured_of(known_families()[0], "h100")
CONFIG = str(STAGE_CONFIGS / "qwen2_5_omni.yaml")
LIKE_THE_CELLS = ["--mix-sound", "10.24", "10.24", "--mix-prompt", "100", "100"]


def planned(**fields: object) -> ClusterPlan:
    like: dict[str, object] = {"sound_s": Range(10.24, 10.24), "prompt_tokens": Range(104, 104), **fields}
    return plan_cluster(MEASURED, Target(**like))  # type: ignore[arg-type]


def replicas(plan: ClusterPlan) -> list[tuple[int, float]]:
    return [(part.replicas, part.gpus) for part in plan.stages]


def test_what_one_card_was_measured_to_carry_takes_one_card() -> None:
    plan = planned(streams=2.378 * 10.24)
    assert (plan.layout, plan.cards, plan.hosts) == ("together", 1, 1)
    assert replicas(plan) == [(1, 0.5), (1, 0.25), (1, 0.25)]
    shown = {figure.name: figure for figure in plan.figures}
    assert shown["first audio p50 / p95"].value == "0.40 / 0.47 s"
    assert shown["first audio p50 / p95"].source == "measured: 2026-11-25-h200-capacity.txt"
    assert 2.378 < plan.most_per_s < 2.828  # 98 % of the streams have no gap there


def test_the_source_says_how_a_figure_is_known() -> None:
    def known(measured: Measured, streams: float, sound_s: float = 10.24) -> str:
        tokens = measured.card.request.prompt_tokens
        target = Target(Range(sound_s, sound_s), Range(tokens, tokens), streams=streams)
        return plan_cluster(measured, target).figures[0].source.partition(":")[0]

    assert known(MEASURED, 15) == "interpolated"  # between two measured loads
    assert known(MEASURED, 300) == "modelled"  # the others were played
    assert [known(H100, streams) for streams in (153, 130, 310)] == ["measured", "interpolated", "modelled"]
    assert known(H100, 153, sound_s=12) == "modelled"


def test_the_stage_that_ends_first_says_where_the_end_is_from() -> None:
    few, many = planned(cards=4).figures[-1], planned(cards=10).figures[-1]
    assert (few.value, few.source) == ("16.2", "fitted: 2026-11-27-code2wav-open-loop.txt")
    assert (many.value, many.source) == ("48.4", "fitted: 2026-11-27-h100x4-fewer-steps.txt")  # two talkers


def test_layouts_of_two_to_four_cards() -> None:
    like: dict[str, Range] = {"sound_s": Range(10.24, 10.24), "prompt_tokens": Range(650, 650)}
    plans = [plan_cluster(H100, Target(cards=cards, **like)) for cards in (2, 3, 4)]
    assert [plan.layout for plan in plans] == ["pair", "apart", "apart"]
    assert [replicas(plan) for plan in plans] == [
        [(1, 0.5), (1, 0.5), (1, 1)],
        [(1, 1), (1, 1), (1, 1)],
        [(1, 1), (1, 1), (2, 1)],
    ]
    with pytest.raises(ConfigError, match=r"^--cards is 1; .* use --cards 2\.$"):
        plan_cluster(H100, Target(cards=1, **like))
    with pytest.raises(ConfigError, match=r"^--cards is 2; .* use --cards 3\.$"):  # two cards were never that soon
        plan_cluster(H100, Target(cards=2, first_audio_s=0.4, **like))


@pytest.mark.parametrize("streams", [72, 73, 110, 300, 1_000, 20_000])
@pytest.mark.parametrize("measured", [MEASURED, H100], ids=["h200", "h100"])
def test_no_fewer_cards_would_do(measured: Measured, streams: int) -> None:
    def best(**asked: int) -> ClusterPlan:
        return plan_cluster(measured, Target(Range(10.24, 10.24), Range(104, 104), **asked))

    plan = best(streams=streams)
    assert plan.most_streams >= streams
    assert plan.cards == sum(part.replicas * part.gpus for part in plan.stages)
    assert best(cards=plan.cards).most_streams >= plan.most_streams
    assert best(cards=plan.cards - 1).most_streams < streams
    assert plan.hosts == math.ceil(plan.cards / 8)


def test_longer_answers_and_prompts_take_more_of_a_card() -> None:
    rates = [
        planned(cards=cards, **fields).most_per_s
        for cards in (1, 8)
        for fields in ({}, {"prompt_tokens": Range(8_000, 8_000)}, {"sound_s": Range(20.48, 20.48)})
    ]
    assert rates[0] > rates[1] and rates[3] >= rates[4]
    assert rates[2] == pytest.approx(rates[0] / 2) and rates[5] == pytest.approx(rates[3] / 2)


def test_a_mix_has_the_mean_of_a_log_uniform_length() -> None:
    assert Range(2, 20).mean == pytest.approx(7.817, abs=1e-3)
    assert (Range(5, 5).mean, Range(2, 8).at(0.5)) == (5, 4)


def test_a_sooner_first_audio_takes_more_cards_and_one_that_nothing_gives_is_named() -> None:
    assert planned(cards=1, first_audio_s=0.4).most_per_s < planned(cards=1).most_per_s
    quick = planned(streams=20, first_audio_s=0.25)  # sooner than a sound card alone was measured to be
    assert (quick.layout, quick.cards) == ("together", 21)
    assert planned(cards=20, first_audio_s=0.25).layout == "together"
    with pytest.raises(ConfigError, match=r"--first-audio is 0\.1; .* use at least 0\.24\.$"):
        planned(streams=1, first_audio_s=0.1)


def test_the_command_prints_a_table_a_plot_and_where_its_figures_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CONFIG, "--streams", "300", *LIKE_THE_CELLS]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("300 streams, 29.30 requests/s, sound 10.24 s, prompts 100 tokens\n8 cards, 1 host of 8")
    assert "NVIDIA H200" in printed and "modelled: " in printed
    bars = [line.split()[1] for line in printed.splitlines() if "#" in line]
    assert len(bars) == 12 and len(bars[0]) > len(bars[-1])


def test_streams_by_their_former_name_are_planned_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CONFIG, "--voices", "300", *LIKE_THE_CELLS]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("300 streams") and printed.err.endswith(
        "--voices is called --streams now, use that.\n"
    )


def test_what_it_writes_is_accepted_and_keeps_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planned.yaml"
    assert main(["plan", CONFIG, "--streams", "300", "--write", str(out), *LIKE_THE_CELLS]) == 0
    capsys.readouterr()
    assert main(["check", str(out)]) == 0
    assert "total GPUs: 8\n" in capsys.readouterr().out
    given, written = yaml.safe_load(Path(CONFIG).read_text()), yaml.safe_load(out.read_text())
    assert [(s["num_replicas"], s["num_gpus"]) for s in written["stages"]] == [(2, 1.0), (2, 1.0), (4, 1.0)]
    assert [s["engine_args"] for s in written["stages"][:2]] == [s["engine_args"] for s in given["stages"][:2]]
    assert written["limits"]["max_prompt_tokens"] == given["limits"]["max_prompt_tokens"]
    assert written["limits"]["max_ongoing_requests"] > 29 * 7 and written["ingress_replicas"] == 6


def test_a_plan_that_follows_its_load_has_the_signals_of_the_simulated_day(tmp_path: Path) -> None:
    out = tmp_path / "planned.yaml"
    assert main(["plan", CONFIG, "--cards", "8", "--follow-load", "--write", str(out), *LIKE_THE_CELLS]) == 0
    assert main(["check", str(out)]) == 0
    scales = [stage.autoscaling for stage in load_config(out, known_families=known_families()).stages]
    assert [(scale.min_replicas, scale.max_replicas) for scale in scales if scale] == [(1, 2), (1, 2), (1, 4)]
    assert [[*scale.signals.model_dump(exclude_none=True)] for scale in scales if scale] == [
        ["max_requests"],
        ["max_backlog_tokens"],
        ["max_slack_use"],
    ]


@pytest.mark.parametrize("follows", [(), ("--follow-load",)])
@pytest.mark.parametrize(
    "changes",
    [
        {"standby_replicas": 1},
        {"num_gpus": 2, "pipeline_parallel_size": 2},
        {
            "num_gpus": 2,
            "tensor_parallel_size": 2,
            "hosts_per_replica": 2,
            "engine_args": {"kv_cache_memory_bytes": 40_000_000_000},
        },
    ],
    ids=["standby", "groups of layers", "hosts"],
)
def test_a_plan_is_for_its_cards_whatever_the_configuration_had(
    changes: dict[str, object], follows: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = yaml.safe_load(Path(CONFIG).read_text()), tmp_path / "planned.yaml"
    given["stages"][1] |= changes
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    argv = ["plan", str(tmp_path / "given.yaml"), "--cards", "8", "--write", str(out), *LIKE_THE_CELLS, *follows]
    assert main(argv) == 0 and main(["check", str(out)]) == 0
    assert f"total GPUs: {'3..' if follows else ''}8\n" in capsys.readouterr().out


@pytest.mark.parametrize(("cards", "shipped"), [("2", "two"), ("4", "four")])
@pytest.mark.parametrize("given", ["qwen2_5_omni", "qwen2_5_omni_one_gpu", "qwen2_5_omni_two_gpus"])
def test_h100s_are_placed_as_the_shipped_files_place_them(cards: str, shipped: str, given: str, tmp_path: Path) -> None:
    def layout(path: Path) -> list[tuple[object, ...]]:
        config = load_config(path, known_families=known_families())
        places = [(s.model_stage, s.gpus, s.gpus_per_replica, s.num_replicas, s.card_priority) for s in config.stages]
        return [*places, (config.ingress_replicas, config.limits.max_ongoing_requests)]

    out, config = tmp_path / "planned.yaml", str(STAGE_CONFIGS / f"{given}.yaml")
    assert main(["plan", config, "--cards", cards, "--card", "h100", "--write", str(out)]) == 0
    assert layout(out) == layout(STAGE_CONFIGS / f"qwen2_5_omni_{shipped}_gpus.yaml")


def test_stages_that_meet_on_a_card_let_the_thinker_go_last(tmp_path: Path) -> None:
    for card, cards in (("h200", "1"), ("h100", "6")):
        out = tmp_path / f"{card}.yaml"
        argv = ["plan", CONFIG, "--cards", cards, "--card", card, "--write", str(out), *LIKE_THE_CELLS]
        assert main(argv) == 0 and main(["check", str(out)]) == 0
        stages = load_config(out, known_families=known_families()).stages
        assert [stage.card_priority for stage in stages] == ["low", "normal", "normal"]
        assert {stage.gpus for stage in stages} == {None}


def test_a_day_is_simulated_with_the_plans_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CONFIG, "--cards", "3", "--day", "2", *LIKE_THE_CELLS]) == 0
    assert "GPU hours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "plan needs --streams or --cards; add one, for example --streams 100."),
        (["--streams", "300", "--cards", "3"], "--cards is 3; 300 streams need 8, or use --streams 83."),
        (["--streams", "9", "--mix-sound", "9", "2"], "--mix-sound is 9 2; name the lower one first."),
        (["--cards", "99999"], "--cards is 99999; use a number up to 10000."),
        (["--streams", "1e15"], "--streams is 1e+15; that takes more than 10000 cards, ask for fewer."),
        (["--cards", "1", "--mix-sound", "0.01", "2"], "--mix-sound is 0.01 2.0; use two numbers from 0.1 to 3600."),
        (["--cards", "1", "--day", "0"], "--day is for plans of two cards or more"),
        (["--cards", "1", "--follow-load"], "--follow-load is for --write"),
        (["--cards", "1", "--model", "x"], "--model is for the memory of a card"),
        (["--cards", "1", "--write", "/"], "--write /: the file cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    mix = [] if "--mix-sound" in argv else LIKE_THE_CELLS
    assert main(["plan", CONFIG, *argv, *mix]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and sentence in printed.err and len(printed.err.splitlines()) == 1
