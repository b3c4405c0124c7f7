from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.autoscaling import AutoscalingConfig, SignalsConfig
from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, check_stages
from omni_cluster.models.registry import known_families
from omni_cluster.server.limits import api_defaults
from omni_cluster.types.errors import ConfigError
from tests.engine.stages import code2wav_stage, pipeline_config, talker_stage, thinker_stage

TOY = Path(__file__).parents[1] / "families" / "toy" / "toy.yaml"


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


def test_preset_that_the_family_does_not_make_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is 'preset:huge'; no such preset exists, use preset:tiny"):
        bind(pipeline_config().model_copy(update={"model": "preset:huge"}))


def test_options_of_a_stage_are_the_familys_to_read() -> None:
    thinker = thinker_stage().model_copy(update={"options": {"haste": 3}})
    with pytest.raises(ConfigError, match=r"^stages\[0\]\.options\.haste is 3; no such key is known, leave it out\.$"):
        bind(pipeline_config(thinker=thinker))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float4"}, r"stages\[2\]\.options\.dtype is 'float4'; it must be .*, for example bfloat16\."),
        ({"vocoder_dtype": "float8"}, r"stages\[2\]\.options\.vocoder_dtype is 'float8'; .*, for example tfloat32\."),
        ({"resident_blocks": 8}, r"stages\[2\]\.options\.resident_blocks is 8; leave it out, a stage that .* now\."),
        ({"max_stream": 3}, r"stages\[2\]\.options\.max_stream is 3; .*, did you mean max_streams\."),
    ],
)
def test_options_of_the_sound_are_told_by_their_place_in_the_file(options: dict[str, object], sentence: str) -> None:
    config = pipeline_config()
    sound = config.stages[2].model_copy(update={"options": options})
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        bind(config.model_copy(update={"stages": [*config.stages[:2], sound]}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"token": 1.0}, "stages[1].options.token is 1.0; no such key is known, did you mean token_s."),
        ({"token_s": "1"}, "stages[1].options.token_s is '1'; it must be a number, for example 0.01."),
        ({"token_s": -1.0}, "stages[1].options.token_s is -1.0; it must be at least 0, for example 0.01."),
    ],
)
def test_an_option_that_is_wrong_is_refused_as_any_key_is(options: dict[str, object], sentence: str) -> None:
    config = load_config(TOY, known_families=known_families())
    codes = config.stages[1].model_copy(update={"options": options})
    with pytest.raises(ConfigError) as refused:
        bind(config.model_copy(update={"stages": [config.stages[0], codes, config.stages[2]]}))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("number", "signal", "others"),
    [
        (0, "max_slack_use", "max_requests or max_kv_use or max_backlog_tokens"),
        (1, "max_slack_use", "max_requests or max_kv_use or max_backlog_tokens"),
        (2, "max_kv_use", "max_requests or max_slack_use"),
        (2, "max_backlog_tokens", "max_requests or max_slack_use"),
    ],
)
def test_a_stage_follows_no_signal_that_it_never_says(number: int, signal: str, others: str) -> None:
    def following(**signals: float) -> PipelineConfig:
        config = pipeline_config()
        scale = AutoscalingConfig(max_replicas=3, signals=SignalsConfig(max_requests=9, **signals))
        stages = list(config.stages)
        stages[number] = stages[number].model_copy(update={"num_replicas": None, "autoscaling": scale})
        return config.model_copy(update={"stages": stages})

    name = ("thinker", "talker", "code2wav")[number]
    with pytest.raises(ConfigError) as refused:
        check_stages(following(**{signal: 0.5}))
    assert str(refused.value) == (
        f"stages[{number}].advanced.autoscaling.signals.{signal} is 0.5; {name} has no such signal, use {others}."
    )
    for known in others.split(" or ")[1:]:
        check_stages(following(**{known: 0.5}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"num_gpus": 2.0, "tensor_parallel_size": 2},
            "stages[2].advanced.tensor_parallel_size is 2; the model of code2wav is not split, set it to 1, and "
            "num_replicas for more cards.",
        ),
        (
            {"pipeline_parallel_size": 3},
            "stages[2].advanced.pipeline_parallel_size is 3; the model of code2wav is not split, set it to 1, and "
            "num_replicas for more cards.",
        ),
        (
            {"default_sampling_params": {"temperature": 0.5}},
            "stages[2].default_sampling_params.temperature is 0.5; code2wav samples nothing, leave it out.",
        ),
    ],
)
def test_what_the_engine_of_sound_would_not_look_at_is_refused(change: dict[str, object], sentence: str) -> None:
    config = pipeline_config()
    sound = config.stages[2].model_copy(update=change)
    with pytest.raises(ConfigError) as refused:
        check_stages(config.model_copy(update={"stages": [*config.stages[:2], sound]}))
    assert str(refused.value) == sentence
