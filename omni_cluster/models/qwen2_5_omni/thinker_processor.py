"""The thinker's media on their way into vLLM: its own processor, but for videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerMultiModalDataParser,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser

from omni_cluster.models import pixels
from omni_cluster.models.qwen2_5_omni.audio_tower import sound_tokens
from omni_cluster.models.qwen2_5_omni.video_tokens import Clock, heard_tokens
from omni_cluster.models.thinker_session import SAMPLE_RATE_HZ, video_item
from omni_cluster.models.thinkers.heard_video_items import HeardVideoItems, largest_video, videos_of
from omni_cluster.models.thinkers.media_places import Grid
from omni_cluster.types.errors import RequestError

_TOKEN_SIDE = 28
"""Pixels of a token's side."""


class ThinkerProcessingInfo(Qwen2_5OmniThinkerProcessingInfo):
    """A video comes with its frame rate and its sound, and may fill a prompt."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """One for all requests: vLLM loads one for each set of options, and these are for a call of it alone."""
        for_a_call = ("audio_kwargs", "truncation", *pixels.OPTIONS)
        processor = super().get_hf_processor(**{name: kwargs[name] for name in kwargs if name not in for_a_call})
        # What it does unless it is told, and it warns of that: a later transformers will do otherwise.
        processor.video_processor.cap_pixels_per_frame = False
        return processor

    def audio_padding(self, mm_items: MultiModalDataItems) -> dict[str, object]:
        """Options that pad sounds to the longest of them; none where there is no sound.

        The processor pads each to 300 s otherwise, which takes a quarter of a second, and fails where one is longer.
        The features are the same: beyond a sound they read zeros for half a window of the Fourier transform.
        """
        if not mm_items.get_all_counts().get("audio", 0):
            return {}
        longest = max(len(sound) for sound in mm_items["audio"].get_all())
        return {"audio_kwargs": {"max_length": longest + self.get_feature_extractor().n_fft // 2}}

    def get_data_parser(self) -> MultiModalDataParser:
        return Qwen2_5OmniThinkerMultiModalDataParser(
            spatial_merge_size=self.get_hf_config().vision_config.spatial_merge_size,
            target_sr=self.get_feature_extractor().sampling_rate,
            target_channels=self.get_target_channels(),
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
            video_needs_metadata=True,
        )

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int] | None:
        tokens = dict(super().get_mm_max_tokens_per_item(seq_len, mm_counts) or {})
        # vLLM counts frames of an image's size; a video's are smaller, and there may be any number of them.
        return tokens | {"video": seq_len} if "video" in tokens else tokens


class ThinkerDummyInputs(Qwen2_5OmniThinkerDummyInputsBuilder):
    """What vLLM tries the encoders with when it starts."""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions) -> Any:
        data = super().get_dummy_mm_data(seq_len, {**mm_counts, "video": 0}, mm_options)
        video = video_item(largest_video(seq_len, _TOKEN_SIDE), fps=2.0, audio=None)
        return {**data, "video": [video] * mm_counts.get("video", 0)}


class ThinkerProcessor(HeardVideoItems, Qwen2_5OmniThinkerMultiModalProcessor):
    """vLLM's, by which each video is one item."""

    info: ThinkerProcessingInfo

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        return self.add_videos(self._processed(mm_items, hf_kwargs), mm_items)

    def _processed(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """As transformers' processor makes it, without what it would do for nothing."""
        context, processor = self.info.ctx, self.info.get_hf_processor()
        images = mm_items["image"].get_all() if "image" in mm_items else []
        seen = [*images, *(frames for frames, _ in videos_of(mm_items))]
        as_bytes = pixels.options_of(processor, seen, context.get_merged_mm_kwargs(hf_kwargs))
        options = {**hf_kwargs, **self.info.audio_padding(mm_items), **as_bytes}
        processed = super()._apply_hf_processor_main(mm_items, options)
        _check_finite(processed)
        if as_bytes:
            pixels.normalize(processed, processor, context.model_config.dtype)
        return processed

    def mel_of(self, sounds: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        items = self.info.parse_mm_data({"audio": [(sound, SAMPLE_RATE_HZ) for sound in sounds]}, validate=False)
        made = self._processed(items, {})
        return made["input_audio_features"], made["audio_feature_lengths"]

    def sound_tokens(self, mel_frames: int) -> int:
        tokens = sound_tokens(mel_frames)
        if tokens < 1:
            raise RequestError("the audio of a video is too short; leave it out, or send at least 0.1 s of it.")
        return tokens

    def is_sound(self, grid: Grid, sound_tokens: int) -> np.ndarray:
        return heard_tokens(grid, sound_tokens, Clock.of(self.info.get_hf_config()))

    @property
    def video_and_sound_ids(self) -> tuple[int, int]:
        config = self.info.get_hf_config()
        return config.video_token_index, config.audio_token_index

    def _maybe_apply_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        # Past vLLM's own for this model, which looks for sound items without places of their own.
        return super(Qwen2_5OmniThinkerMultiModalProcessor, self)._maybe_apply_prompt_updates(*args, **kwargs)


def _check_finite(processed: BatchFeature) -> None:
    """Raises RequestError for sound whose energy is beyond float32. Pixels are bytes: theirs are always finite."""
    features = processed.get("input_audio_features")
    if features is not None and not features.sum(dtype=torch.float64).isfinite():
        raise RequestError("a sound has samples of more energy than can be computed with; send samples from -1 to 1.")
