from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds


@pytest.fixture
def config(tiny: Path) -> dict[str, Any]:
    return read_config(tiny)


def test_codec_ids_of_the_tiny_checkpoint_are_those_of_the_large(config: dict[str, Any]) -> None:
    ids = SpecialIds.from_config(config)
    assert (ids.codec_pad, ids.codec_bos, ids.codec_eos, ids.codec_mask) == (8292, 8293, 8294, 8296)
    assert ids.codec_stops == (8292, 8294)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("tts_codec_pad_token_id", "codec_pad"),
        ("tts_codec_start_token_id", "codec_bos"),
        ("tts_codec_end_token_id", "codec_eos"),
        ("tts_codec_mask_token_id", "codec_mask"),
        ("tts_text_pad_token_id", "text_pad"),
        ("tts_text_end_token_id", "text_eos"),
    ],
)
def test_a_changed_config_changes_that_id_alone(config: dict[str, Any], key: str, name: str) -> None:
    before = SpecialIds.from_config(config)
    config["talker_config"][key] = 77
    after = SpecialIds.from_config(config)
    assert {f for f in SpecialIds.__slots__ if getattr(before, f) != getattr(after, f)} == {name}
    assert getattr(after, name) == 77


def test_number_of_codes_is_that_of_the_code_embedding(config: dict[str, Any], tiny: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", "pt") as file:
        rows, _ = file.get_slice("token2wav.code2wav_dit_model.text_embed.codec_embed.weight").get_shape()
    assert SpecialIds.from_config(config).num_codes == rows
    config["token2wav_config"]["dit_config"]["num_embeds"] = 99
    assert SpecialIds.from_config(config).num_codes == 100
