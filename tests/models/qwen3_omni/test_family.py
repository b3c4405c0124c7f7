"""What the family says of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.engine.build import bind
from omni_cluster.engine.fitting import memory_plan
from omni_cluster.memory.sizes import GIB
from omni_cluster.models.family import Hearing
from omni_cluster.models.qwen3_omni.family import Qwen3Omni
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage_spec import SoundSpec
from omni_cluster.types.errors import ConfigError, RequestError

HELLO = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def family(qwen3_folder: Path) -> Qwen3Omni:
    return Qwen3Omni(qwen3_folder)


def test_stages_in_the_order_of_the_data(family: Qwen3Omni) -> None:
    assert [(name, spec.source) for name, spec in family.specs.items()] == [
        ("thinker", None), ("talker", "thinker"), ("code2wav", "talker"),
    ]  # fmt: skip
    sound = family.specs["code2wav"]
    assert isinstance(sound, SoundSpec)
    assert (sound.sample_rate_hz, sound.samples_per_code, sound.codes_per_s) == (24_000, 1_920, 12.5)


def test_voices_have_names_in_lower_case_and_as_their_authors_write_them(qwen3_folder: Path, family: Qwen3Omni) -> None:
    assert family.voices == ("ethan", "aiden", "chelsie") and family.check_voice(None) == "ethan"
    assert [family.voice_aliases[name] for name in ("Aiden", "Ethan", "alloy", "onyx", "default")] == [
        "aiden", "ethan", "chelsie", "ethan", "ethan",
    ]  # fmt: skip
    assert Qwen3Omni(qwen3_folder, "Aiden", ["Chelsie"]).voices == ("aiden", "chelsie")
    with pytest.raises(RequestError, match="voice is 'Nobody'; use one of ethan, aiden, chelsie"):
        family.check_voice("Nobody")
    with pytest.raises(ConfigError, match="voice 'nobody' is not in the checkpoint"):
        Qwen3Omni(qwen3_folder, "Nobody")


def test_a_conversation_is_the_template_s_and_its_media_are_counted(family: Qwen3Omni) -> None:
    content = [{"type": "audio", "audio": "x"}, {"type": "text", "text": "What is it?"}]
    assert family.render([{"role": "user", "content": content}]).text == (
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    audio, image, video = family.media_ids
    assert family.audio_tokens([audio, 1, image, audio, video]) == 2


def test_tools_are_told_in_a_system_message_of_their_own(family: Qwen3Omni) -> None:
    text = family.render([HELLO], TOOLS).text
    assert text.startswith("<|im_start|>system\n# Tools") and '"weather"' in text


def test_a_sound_is_written_down_without_a_system_message(family: Qwen3Omni) -> None:
    assert family.hearing(Hearing("English")).text == (
        "<|im_start|>user\nTranscribe the English audio into text.<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_marks_of_media_in_a_text_that_is_gone_on_with_are_refused(family: Qwen3Omni) -> None:
    with pytest.raises(RequestError, match=r"the prompt has <\|audio_pad\|>, which stands for media"):
        family.completing("Hello <|audio_pad|>")


def test_a_checkpoint_without_sound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="use a Qwen3-Omni checkpoint"):
        Qwen3Omni(tmp_path)


@pytest.mark.parametrize("name", ["one_gpu", "one_gpu_low_precision", "two_gpus", "four_gpus"])
def test_each_configuration_has_a_memory_plan(qwen3_folder: Path, name: str) -> None:
    config = load_config(STAGE_CONFIGS / f"qwen3_omni_{name}.yaml", known_families=known_families())
    plan = memory_plan(bind(config.model_copy(update={"model": str(qwen3_folder)})), 80 * GIB)
    assert len(plan.engines) == 3 and all(engine.total > 0 for engine in plan.engines.values())
