"""The ids that hold the stages together, all read from the checkpoint's own config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """`codec_*`: codes of the talker's vocabulary; `text_*`: ids of the thinker's token table."""

    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_mask: int
    text_pad: int
    text_eos: int
    num_codes: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SpecialIds:
        talker = config["talker_config"]
        return cls(
            codec_pad=talker["tts_codec_pad_token_id"],
            codec_bos=talker["tts_codec_start_token_id"],
            codec_eos=talker["tts_codec_end_token_id"],
            codec_mask=talker["tts_codec_mask_token_id"],
            text_pad=talker["tts_text_pad_token_id"],
            text_eos=talker["tts_text_end_token_id"],
            num_codes=config["token2wav_config"]["dit_config"]["num_embeds"] + 1,
        )

    @property
    def codec_stops(self) -> tuple[int, int]:
        return self.codec_pad, self.codec_eos


@dataclass(frozen=True, slots=True)
class MediaIds:
    """What the thinker's prompt has in place of each row of a sound, a picture or a video."""

    audio: int
    image: int
    video: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MediaIds:
        thinker = config["thinker_config"]
        return cls(thinker["audio_token_index"], thinker["image_token_index"], thinker["video_token_index"])

    def __iter__(self) -> Iterator[int]:
        yield from (self.audio, self.image, self.video)
