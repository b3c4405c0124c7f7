"""Who shares a card with whom, as the printed plan and the memory of cards have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.config.plan import resolve_plan
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.config.sharing import (
    all_share_a_card,
    by_fractions,
    fit_one_card,
    on_cards_of_one_process,
    on_pinned_cards,
    with_cards_alone,
)
from omni_cluster.memory.devices import cards_of_replicas


def stages(*given: dict[str, Any]) -> list[StageConfig]:
    return [
        StageConfig(stage_id=i, model_stage=f"s{i}", final_output_type="text", **fields)
        for i, fields in enumerate(given)
    ]


MIXED = stages(
    {"gpus": [1, 0], "tensor_parallel_size": 2},
    {"gpus": [1], "num_replicas": 2},
    {"num_gpus": 2, "tensor_parallel_size": 2},
    {"num_gpus": 0.1, "num_replicas": 3},
    {"num_gpus": 0.7},
    {"num_gpus": 0},
)


def test_each_stage_is_on_named_cards_or_alone_or_shares_or_has_none() -> None:
    assert on_pinned_cards(MIXED) == {0: {0: 1}, 1: {0: 1, 1: 2}}
    assert list(on_pinned_cards(MIXED)) == [0, 1]
    assert [stage.stage_id for stage in with_cards_alone(MIXED)] == [2]
    assert [stage.stage_id for stage in by_fractions(MIXED)] == [3, 4]


def test_parts_meet_on_one_card_up_to_the_whole_of_it() -> None:
    assert fit_one_card(by_fractions(MIXED))
    assert not fit_one_card(stages({"num_gpus": 0.1, "num_replicas": 4}, {"num_gpus": 0.7}))


def test_a_process_has_one_engine_of_each_stage_from_its_first_card_on() -> None:
    assert on_cards_of_one_process(MIXED, first=2) == {
        0: {0: 1},
        1: {0: 1, 1: 1},
        2: {2: 1, 3: 1, 4: 1},
        3: {2: 1},
    }


def test_all_share_a_card_that_has_an_engine_of_each() -> None:
    parts = [{"num_gpus": 0.5}, {"num_gpus": 0.25}, {"num_gpus": 0.25}]
    assert all_share_a_card(stages(*parts)) and all_share_a_card(stages(*parts, {"num_gpus": 0}))
    assert not all_share_a_card(stages(*parts, {"num_gpus": 0.25}))  # Ray decides who meets whom
    assert not all_share_a_card(stages(*parts, {"num_gpus": 1}))
    assert all_share_a_card(stages({"gpus": [0, 1], "tensor_parallel_size": 2}, {"gpus": [1]}))
    assert not all_share_a_card(stages({"gpus": [0, 1], "tensor_parallel_size": 2}, {"gpus": [1]}, {"gpus": [0]}))
    assert not all_share_a_card(stages({"num_gpus": 0.5}, {"num_gpus": 0}))
    assert not all_share_a_card(stages({"num_gpus": 0}, {"num_gpus": 0}))


@pytest.mark.parametrize("path", sorted(STAGE_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_stages_of_the_configurations_for_one_card_share_it_and_no_others_do(path: Path) -> None:
    shipped = load_config(path, known_families=["qwen2_5_omni", "qwen3_omni"])
    assert all_share_a_card(shipped.stages) == ("one_gpu" in path.stem)


def test_the_plan_and_the_memory_have_the_same_engines_on_a_card() -> None:
    planned = resolve_plan(PipelineConfig(model="m", family="f", stages=MIXED)).shared_cards
    shared = [card for card in cards_of_replicas(MIXED, usable=100) if sum(card.engines.values()) > 1]
    assert [share.card for share in planned] == ["GPU 1", "a card shared by fractions"]
    assert [card.name for card in shared] == ["GPU 1", "the shared card"]
    assert len(planned[0].engines) == sum(shared[0].engines.values()) == 3
    assert len(planned[1].engines) == len(shared[1].engines) == 2
