"""The ids that the talker's input is made of, all read from the checkpoint's own config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_cluster.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TextIds:
    """Of the thinker's vocabulary, which has `num_ids`.

    `media`: what a prompt has in place of each row of a sound, a picture or a video.
    """

    im_start: int
    user: int
    assistant: int
    pad: int
    bos: int
    eos: int
    media: tuple[int, int, int]
    num_ids: int


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Of the talker's vocabulary, whose first `num_codes` ids are codes.

    `unspoken`: of a position without a codec side: an id that means nothing, so that no penalty counts it.
    """

    nothink: int
    think_bos: int
    think_eos: int
    pad: int
    bos: int
    eos: int
    unspoken: int
    num_codes: int


@dataclass(frozen=True, slots=True)
class TalkerIds:
    """Of both sides of a position."""

    text: TextIds
    codec: CodecIds

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TalkerIds:
        """Of a checkpoint's config.json. Raises ConfigError where all ids of the talker mean something."""
        return cls(_text_ids(config), _codec_ids(config))


def _text_ids(config: Mapping[str, Any]) -> TextIds:
    thinker = config["thinker_config"]
    return TextIds(
        im_start=config["im_start_token_id"],
        user=config["user_token_id"],
        assistant=config["assistant_token_id"],
        pad=config["tts_pad_token_id"],
        bos=config["tts_bos_token_id"],
        eos=config["tts_eos_token_id"],
        media=(thinker["audio_token_id"], thinker["image_token_id"], thinker["video_token_id"]),
        num_ids=thinker["text_config"]["vocab_size"],
    )


def _codec_ids(config: Mapping[str, Any]) -> CodecIds:
    talker, num_codes = config["talker_config"], config["code2wav_config"]["codebook_size"]
    special = {
        "nothink": talker["codec_nothink_id"],
        "think_bos": talker["codec_think_bos_id"],
        "think_eos": talker["codec_think_eos_id"],
        "pad": talker["codec_pad_id"],
        "bos": talker["codec_bos_id"],
        "eos": talker["codec_eos_token_id"],
    }
    taken = {*special.values(), *talker["speaker_id"].values()}
    free = set(range(num_codes, talker["text_config"]["vocab_size"])) - taken
    if not free:
        raise ConfigError("each id of the talker is a code, a mark or a voice; one that means nothing is needed.")
    return CodecIds(**special, unspoken=max(free), num_codes=num_codes)
