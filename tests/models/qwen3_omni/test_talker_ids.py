from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.voices import voice_id, voice_ids
from omni_cluster.types.errors import ConfigError, RequestError


@pytest.fixture(scope="module")
def config(qwen3_folder: Path) -> dict[str, Any]:
    return read_config(qwen3_folder)


def test_ids_are_the_configurations(config: dict[str, Any], qwen3_reference: Any) -> None:
    ids, theirs = TalkerIds.from_config(config), qwen3_reference.config
    assert ids.text.im_start == theirs.im_start_token_id and ids.text.eos == theirs.tts_eos_token_id
    thinker, talker = theirs.thinker_config, theirs.talker_config
    assert ids.text.media == (thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)
    assert ids.codec.eos == talker.codec_eos_token_id and ids.codec.think_bos == talker.codec_think_bos_id
    assert ids.codec.num_codes == talker.code_predictor_config.vocab_size == talker.text_config.vocab_size - 1024


def test_the_id_without_a_meaning_is_no_code_no_mark_and_no_voice(config: dict[str, Any]) -> None:
    codec = TalkerIds.from_config(config).codec
    others = {codec.nothink, codec.think_bos, codec.think_eos, codec.pad, codec.bos, codec.eos}
    assert codec.num_codes <= codec.unspoken < config["talker_config"]["text_config"]["vocab_size"]
    assert codec.unspoken not in others | set(voice_ids(config).values())


def test_a_talker_of_ids_that_all_mean_something_is_refused(config: dict[str, Any]) -> None:
    full = copy.deepcopy(config)
    vocabulary = full["talker_config"]["text_config"]["vocab_size"]
    full["talker_config"]["speaker_id"] = {str(i): i for i in range(256, vocabulary)}
    with pytest.raises(ConfigError, match="each id of the talker is a code, a mark or a voice"):
        TalkerIds.from_config(full)


def test_voices_are_ids_by_name_in_any_case_the_default_first(config: dict[str, Any]) -> None:
    voices = voice_ids(config)
    assert voices == {"ethan": 510, "chelsie": 509, "aiden": 511} and next(iter(voices)) == "ethan"
    assert [voice_id(voices, name) for name in ("Aiden", "CHELSIE")] == [511, 509]


def test_a_voice_that_is_not_there_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^voice is 'Dylan'; use one of ethan, aiden, chelsie.$"):
        voice_id(voice_ids(config), "Dylan")


def test_a_checkpoint_without_voices_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no speaker_id; use a checkpoint with voices"):
        voice_ids({"talker_config": {}})
