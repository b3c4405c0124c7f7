from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind
from omni_cluster.errors import ConfigError
from omni_cluster.server.limits import api_defaults
from tests.engine.stages import code2wav_stage, pipeline_config, talker_stage, thinker_stage


def pipeline(*stages: StageConfig) -> PipelineConfig:
    return PipelineConfig(model="preset:tiny", family="qwen2_5_omni", stages=list(stages))


def test_bound_pipeline_knows_its_checkpoint_and_who_feeds_whom(tiny: Path) -> None:
    bound = bind(pipeline_config())
    thinker, talker, code2wav = bound.config.stages
    assert bound.folder == tiny
    assert [bound.source(stage) for stage in (thinker, talker, code2wav)] == [None, thinker, talker]
    assert [bound.consumers(stage) for stage in (thinker, talker, code2wav)] == [[talker], [code2wav], []]


def test_order_of_the_stages_does_not_matter() -> None:
    bound = bind(pipeline(code2wav_stage(), talker_stage(), thinker_stage()))
    code2wav, talker, _ = bound.config.stages
    assert bound.source(code2wav) is talker


def test_default_voice_is_the_configurations() -> None:
    assert bind(pipeline_config(default_voice="Ethan")).family.voices[0] == "Ethan"


def test_an_alias_is_of_a_voice_on_offer() -> None:
    aliases = api_defaults(
        bind(pipeline_config(api=ApiConfig(voice_aliases={"alloy": "Ethan", "Bob": "Ethan"})))
    ).voice_aliases
    assert (aliases["alloy"], aliases["Bob"], aliases["nova"]) == ("Ethan", "Ethan", "Chelsie")
    with pytest.raises(ConfigError, match=r"api\.voice_aliases\.alloy is 'Bob'; use one of Chelsie, Ethan"):
        bind(pipeline_config(api=ApiConfig(voice_aliases={"alloy": "Bob"})))


def test_stage_that_the_family_does_not_have_is_refused() -> None:
    stranger = thinker_stage().model_copy(update={"model_stage": "painter"})
    with pytest.raises(
        ConfigError, match="stage 0: model_stage is 'painter'; qwen2_5_omni has thinker, talker, code2wav"
    ):
        bind(pipeline(stranger))


def test_stage_with_two_sources_is_refused() -> None:
    both = code2wav_stage().model_copy(update={"engine_input_source": [0, 1]})
    with pytest.raises(ConfigError, match=r"stage 2 .*: engine_input_source is \[0, 1\]; .* needs \[1\]"):
        bind(pipeline(thinker_stage(), talker_stage(), both))


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="family is 'llama'"):
        bind(pipeline_config().model_copy(update={"family": "llama"}))


def test_voice_that_the_checkpoint_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="voice 'Nobody'"):
        bind(pipeline_config(default_voice="Nobody"))


def test_talker_without_a_source_is_refused() -> None:
    alone = talker_stage().model_copy(update={"engine_input_source": [], "final_output_type": "text"})
    with pytest.raises(ConfigError, match=r"stage 1.*engine_input_source"):
        bind(pipeline(alone))
