"""What a soak serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from tests.chaos.application import with_checkpoint
from tests.chaos.cases import cases, refused

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", ["one_card_7b.yaml", "one_card_tiny.yaml"])
def test_two_replicas_of_each_stage_are_on_one_card_in_float32(name: str) -> None:
    config = load_config(FOLDER / name, known_families=("qwen2_5_omni",))
    places = {stage.model_stage: (stage.gpus, stage.num_replicas) for stage in config.stages}
    assert places == dict.fromkeys(("thinker", "talker", "code2wav"), ([0], 2))
    thinker, talker, code2wav = config.stages
    assert thinker.engine_args["dtype"] == talker.engine_args["dtype"] == "float32"
    options = Code2WavOptions(**code2wav.options)
    assert options.dtype == options.vocoder_dtype == "float32"


def test_each_of_two_nodes_with_two_cards_has_a_replica_of_each_stage_that_repeats_its_tokens() -> None:
    config = load_config(FOLDER / "four_cards_7b.yaml", known_families=("qwen2_5_omni",))
    places = {stage.model_stage: (stage.num_gpus, stage.num_replicas) for stage in config.stages}
    assert places == {"thinker": (1, 2), "talker": (0.5, 2), "code2wav": (0.5, 2)}
    placements = [stage.placement for stage in config.stages]
    assert {each.max_replicas_per_node for each in (*placements, config.ingress_placement)} == {1}
    thinker, talker, code2wav = config.stages
    assert thinker.engine_args["dtype"] == talker.engine_args["dtype"] == "float32"
    shipped = load_config(STAGE_CONFIGS / "qwen2_5_omni_four_gpus.yaml", known_families=("qwen2_5_omni",)).stages[2]
    options, of_shipped = (Code2WavOptions(**stage.options) for stage in (code2wav, shipped))
    assert (options.dtype, options.vocoder_dtype) == (of_shipped.dtype, of_shipped.vocoder_dtype)


def test_a_checkpoint_takes_the_place_of_the_model() -> None:
    assert with_checkpoint({"model": "preset:tiny"}, None) == {"model": "preset:tiny"}
    assert with_checkpoint({"model": "preset:tiny", "family": "f"}, Path("/made")) == {"model": "/made", "family": "f"}


def test_clients_ask_the_model_that_is_served() -> None:
    assert {case.body["model"] for case in (*cases("/made"), *refused("/made"))} == {"/made"}
