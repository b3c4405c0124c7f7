"""What a configuration comes to, and how a terminal shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.config.plan import Plan, render_plan, resolve_plan
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.types.errors import ConfigError
from tests.configs import TINY_CONFIG

FAMILIES = ("qwen2_5_omni", "qwen3_omni")

TINY = """\
model preset:tiny, family qwen2_5_omni

id  stage     replicas  GPUs  memory           from     to
0   thinker   1         0     64 MiB KV cache  client   talker, client (text)
1   talker    1         0     64 MiB KV cache  thinker  code2wav
2   code2wav  1         0     not stated       talker   client (audio)

transfers: thinker -> talker, talker -> code2wav
compiled kernels and graphs: /caches/omni_cluster/compiled
total GPUs: 0
"""

ONE_HOST = """\
model m, family f

id  stage    replicas  GPUs         memory                              from           to
0   thinker  1         2 (GPU 0,1)  0.60 of the card                    client         mixer, client (text)
7   eyes     1         1 (GPU 1)    0.25 of the card, 1.5 GiB KV cache  client         mixer
3   mixer    1..3      0.5          0.40 of the card                    thinker, eyes  client (audio)

transfers: thinker -> mixer, eyes -> mixer
GPU 1: thinker 0.60 of the card + eyes 0.25 of the card, 1.5 GiB KV cache; stated: at most 0.85 of its memory
a card shared by fractions: mixer 0.5 GPU, 0.40 of the card; stated: at most 0.80 of its memory
compiled kernels and graphs: /caches/omni_cluster/compiled
total GPUs: 2.5..3.5
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")


def plan_of(*stages: dict[str, Any]) -> Plan:
    defaults = {"final_output_type": "text"}
    named = [{"stage_id": i, "model_stage": f"s{i}", **defaults, **stage} for i, stage in enumerate(stages)]
    return resolve_plan(PipelineConfig.model_validate({"model": "m", "family": "f", "stages": named}))


def memory(fraction: float) -> dict[str, float]:
    return {"gpu_memory_utilization": fraction}


def test_the_default_deployment_as_a_terminal_shows_it() -> None:
    assert render_plan(resolve_plan(load_config(TINY_CONFIG, known_families=FAMILIES))) == TINY


def test_shared_cards_pinned_devices_and_growing_stages_as_a_terminal_shows_them() -> None:
    plan = plan_of(
        {
            "stage_id": 3,
            "model_stage": "mixer",
            "engine_input_source": [0, 7],
            "num_gpus": 0.5,
            "engine_args": memory(0.4),
            "autoscaling": {"min_replicas": 1, "max_replicas": 3, "signals": {"max_requests": 24}},
            "final_output_type": "audio",
        },
        {
            "stage_id": 0,
            "model_stage": "thinker",
            "gpus": [0, 1],
            "tensor_parallel_size": 2,
            "engine_args": memory(0.6),
        },
        {
            "stage_id": 7,
            "model_stage": "eyes",
            "gpus": [1],
            "engine_args": {**memory(0.25), "kv_cache_memory_bytes": 3 << 29},
            "final_output_type": None,
        },
    )
    assert render_plan(plan) == ONE_HOST


@pytest.mark.parametrize("path", sorted(STAGE_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_shipped_file_has_a_plan_in_data_order(path: Any) -> None:
    plan = resolve_plan(load_config(path, known_families=FAMILIES))
    assert [stage.name for stage in plan.stages] == ["thinker", "talker", "code2wav"]
    assert "\ntransfers: thinker -> talker, talker -> code2wav\n" in render_plan(plan)
    assert all(stage.name in render_plan(plan) for stage in plan.stages)


def test_the_full_size_deployment_takes_three_cards() -> None:
    plan = resolve_plan(load_config(STAGE_CONFIGS / "qwen2_5_omni.yaml", known_families=FAMILIES))
    assert (plan.min_gpus, plan.max_gpus) == (3, 3)
    assert plan.shared_cards == ()


def test_the_folder_of_compiled_kernels_is_the_one_that_is_named() -> None:
    config = load_config(TINY_CONFIG, known_families=FAMILIES).model_copy(update={"cache_dir": "~/kept"})
    named = render_plan(resolve_plan(config)).splitlines()[-2]
    assert named == f"compiled kernels and graphs: {Path.home() / 'kept'}"


def test_memory_is_a_stages_part_where_it_says_so() -> None:
    assert plan_of({"num_gpus": 1, "memory_gib": 24.5}).stages[0].memory == "24.5 GiB of the card"


def test_a_shared_card_of_which_nothing_is_stated_says_no_sum() -> None:
    text = render_plan(plan_of({"num_gpus": 0.5}, {"num_gpus": 0.5}))
    assert "by fractions: s0 0.5 GPU, computed at start + s1 0.5 GPU, computed at start\n" in text


def test_stages_come_after_all_that_feed_them_whatever_their_order_in_the_file() -> None:
    plan = plan_of(
        {"engine_input_source": [2, 3], "num_gpus": 0},
        {"num_gpus": 0},
        {"engine_input_source": [1], "num_gpus": 0},
        {"engine_input_source": [1, 2], "num_gpus": 0},
    )
    assert [stage.stage_id for stage in plan.stages] == [1, 2, 3, 0]
    assert plan.stages[1].inputs == ("s1",) and plan.stages[1].outputs == ("s3", "s0")


@pytest.mark.parametrize(
    ("engine_args", "text"),
    [
        ({}, "computed at start"),
        ({"gpu_memory_utilization": None, "kv_cache_memory_bytes": None}, "computed at start"),
        (memory(0.9), "0.90 of the card"),
        ({"kv_cache_memory_bytes": 500}, "500 B KV cache"),
        ({"kv_cache_memory_bytes": 1 << 10}, "1 KiB KV cache"),
        ({"kv_cache_memory_bytes": 5 << 40}, "5120 GiB KV cache"),
    ],
)
def test_memory_is_what_the_engine_arguments_say(engine_args: dict[str, Any], text: str) -> None:
    assert plan_of({"num_gpus": 1, "engine_args": engine_args}).stages[0].memory == text


def test_total_gpus_count_each_pinned_card_once_and_each_scheduled_replica() -> None:
    plan = plan_of(
        {"gpus": [0, 1], "tensor_parallel_size": 2},
        {"gpus": [1]},
        {"num_gpus": 1, "num_replicas": 2},
        {"num_gpus": 0.25, "autoscaling": {"min_replicas": 2, "max_replicas": 4, "signals": {"max_requests": 24}}},
    )
    assert (plan.min_gpus, plan.max_gpus) == (4.5, 5)


def test_a_pinned_card_may_be_full_to_the_brim() -> None:
    plan = plan_of(*({"gpus": [0], "engine_args": memory(fraction)} for fraction in (0.1, 0.2, 0.7)))
    assert [share.card for share in plan.shared_cards] == ["GPU 0"]
    assert plan.shared_cards[0].memory_fraction == pytest.approx(1.0)


def test_a_pinned_card_filled_beyond_its_memory_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(
            {"num_gpus": 0},
            {"gpus": [2], "engine_args": memory(0.7)},
            {"gpus": [1, 2], "tensor_parallel_size": 2, "engine_args": memory(0.5)},
        )
    assert str(caught.value) == (
        "stages[1].engine_args.gpu_memory_utilization is 0.7; the engines on GPU 2 (s1 0.70, s2 0.50) take 1.20 of its "
        "memory together, keep the sum at most 1.0, for example 0.5 each."
    )


def test_replicas_pinned_to_one_card_count_each() -> None:
    with pytest.raises(ConfigError, match=r"s0 0\.40, s0 0\.40, s0 0\.40\) take 1\.20 .* for example 0\.33 each"):
        plan_of({"gpus": [0], "num_replicas": 3, "engine_args": memory(0.4)})


@pytest.mark.parametrize(
    ("stages", "bound"),
    [
        # One replica of each: they may all meet on one card.
        ([(0.5, 0.4, 1), (0.5, 0.5, 1)], 0.9),
        # Enough replicas to fill a card with the stage that takes the most memory for its share.
        ([(0.5, 0.4, 2), (0.25, 0.3, 4)], 1.2),
    ],
)
def test_cards_shared_by_fractions_are_bounded_and_not_refused(
    stages: list[tuple[float, float, int]], bound: float
) -> None:
    plan = plan_of(*({"num_gpus": g, "engine_args": memory(m), "num_replicas": n} for g, m, n in stages))
    assert plan.shared_cards[0].memory_fraction == pytest.approx(bound)


def test_a_lone_fraction_shares_with_nobody() -> None:
    assert plan_of({"num_gpus": 0.5}).shared_cards == ()
