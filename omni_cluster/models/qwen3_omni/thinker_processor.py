"""The thinker's media on their way into vLLM: its own processor, but for sounds and videos.

vLLM 0.32 fills a sound up to a whole step of the mel filter, which makes a frame more than transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerMultiModalProcessor
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerMultiModalDataParser,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser

from omni_cluster.models import pixels
from omni_cluster.models.qwen3_omni.thinker_stage import AUDIO_ITEM_TOKENS
from omni_cluster.models.qwen3_omni.video_tokens import heard_tokens
from omni_cluster.models.thinker_session import SAMPLE_RATE_HZ, video_item
from omni_cluster.models.thinkers.heard_video_items import HeardVideoItems, largest_video, videos_of
from omni_cluster.models.thinkers.media_places import Grid
from omni_cluster.types.errors import RequestError

_FRAMES_PER_CHUNK, _TOKENS_PER_CHUNK = 100, 13
"""Mel frames that the audio tower convolves at a time, and the tokens that it makes of them."""


class ThinkerProcessingInfo(Qwen3OmniMoeThinkerProcessingInfo):
    """A video comes with its frame rate and its sound, and may fill a prompt."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """One for all requests: vLLM loads one for each set of options, and these are for a call of it alone."""
        for_a_call = ("truncation", *pixels.OPTIONS)
        processor = super().get_hf_processor(**{name: kwargs[name] for name in kwargs if name not in for_a_call})
        # What it does unless it is told, and it warns of that: a later transformers will do otherwise.
        processor.video_processor.cap_pixels_per_frame = False
        return processor

    def get_data_parser(self) -> MultiModalDataParser:
        return Qwen3OmniMoeThinkerMultiModalDataParser(
            spatial_merge_size=self.get_hf_config().vision_config.spatial_merge_size,
            target_sr=self.get_feature_extractor().sampling_rate,
            target_channels=self.get_target_channels(),
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
            video_needs_metadata=True,
        )

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int] | None = None) -> Mapping[str, int]:
        # vLLM counts sound as Qwen2-Audio does, and frames of an image's size: a video's are smaller, of any number.
        most = {"audio": AUDIO_ITEM_TOKENS, "video": seq_len}
        counted = super().get_mm_max_tokens_per_item(seq_len, mm_counts)
        return {kind: most.get(kind, tokens) for kind, tokens in counted.items()}


class ThinkerDummyInputs(Qwen3OmniMoeThinkerDummyInputsBuilder):
    """What vLLM tries the encoders with when it starts."""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions) -> Any:
        data = super().get_dummy_mm_data(seq_len, {**mm_counts, "video": 0}, mm_options)
        vision = self.info.get_hf_config().vision_config
        video = video_item(largest_video(seq_len, vision.patch_size * vision.spatial_merge_size), fps=2.0, audio=None)
        return {**data, "video": [video] * mm_counts.get("video", 0)}


class ThinkerProcessor(HeardVideoItems, Qwen3OmniMoeThinkerMultiModalProcessor):
    """vLLM's, by which each video is one item, and each sound has the frames that transformers gives it alone."""

    info: ThinkerProcessingInfo

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        processed = self._seen(mm_items, hf_kwargs)
        if "audio" in mm_items:
            mel, lengths = self.mel_of(mm_items["audio"].get_all())
            masks = [torch.ones(int(length)) for length in lengths]
            sounds = {"input_audio_features": mel, "audio_feature_lengths": lengths, "feature_attention_mask": masks}
            processed.update(sounds)
        return self.add_videos(processed, mm_items)

    def _seen(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """Images and videos as transformers' processor makes them, without what it would do for nothing."""
        context, processor = self.info.ctx, self.info.get_hf_processor()
        seen = MultiModalDataItems({kind: mm_items[kind] for kind in ("image", "video") if kind in mm_items})
        images = seen["image"].get_all() if "image" in seen else []
        pictures = [*images, *(frames for frames, _ in videos_of(seen))]
        as_bytes = pixels.options_of(processor, pictures, context.get_merged_mm_kwargs(hf_kwargs))
        processed = super()._apply_hf_processor_main(seen, {**hf_kwargs, **as_bytes})
        if as_bytes:
            pixels.normalize(processed, processor, context.model_config.dtype)
        return processed

    def mel_of(self, sounds: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' processor makes them of each sound alone.

        It fills sounds of one prompt up to the longest, and then counts a frame more of those that end within one.
        """
        features = [self._mel(sound) for sound in sounds]
        return torch.cat(features, dim=1), torch.tensor([each.shape[1] for each in features])

    def _mel(self, sound: np.ndarray) -> torch.Tensor:
        """`[mel bins, frames]`. RequestError for what has no frame, or energy beyond float32."""
        extractor = self.info.get_feature_extractor()
        # The Fourier transform looks half a window beyond the ends, into the sound's mirror image.
        if len(sound) <= extractor.n_fft // 2:
            raise RequestError(f"a sound has {len(sound)} samples; send at least {SAMPLE_RATE_HZ // 10}, 0.1 s of it.")
        made = extractor(
            sound, sampling_rate=SAMPLE_RATE_HZ, padding=True, truncation=False, return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        features: torch.Tensor = made["input_features"][0][:, : int(made["attention_mask"].sum())]
        if not features.sum(dtype=torch.float64).isfinite():
            raise RequestError(
                "a sound has samples of more energy than can be computed with; send samples from -1 to 1."
            )
        return features.to(self.info.ctx.model_config.dtype)

    def sound_tokens(self, mel_frames: int) -> int:
        return sound_tokens(mel_frames)

    def is_sound(self, grid: Grid, sound_tokens: int) -> np.ndarray:
        return heard_tokens(grid, sound_tokens, self.info.get_hf_config().position_id_per_seconds)

    @property
    def video_and_sound_ids(self) -> tuple[int, int]:
        config = self.info.get_hf_config()
        return config.video_token_id, config.audio_token_id

    def _maybe_apply_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        # Past vLLM's own for these models, which look for sound items without places of their own.
        return super(Qwen2_5OmniThinkerMultiModalProcessor, self)._maybe_apply_prompt_updates(*args, **kwargs)


def sound_tokens(mel_frames: int) -> int:
    """What the audio tower makes of so many frames: three convolutions of a chunk take every second one."""
    chunks, rest = divmod(mel_frames, _FRAMES_PER_CHUNK)
    for _ in range(3):
        rest = (rest + 1) // 2
    return chunks * _TOKENS_PER_CHUNK + rest
