"""The thinker's media on their way into vLLM: its own processor, but for videos.

vLLM 0.32 takes one frame rate for all videos of a request, and makes a video that is heard of two items that overlap in
the prompt: its encoder cache, prefix cache and chunked prefill are made for items that follow each other. Here a video
is one item, which has its frame rate and its sound with it.
"""

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
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing.processor import (
    HFMultiModalInputs,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from omni_cluster.models import pixels
from omni_cluster.models.qwen2_5_omni.audio_tower import sound_tokens
from omni_cluster.models.qwen2_5_omni.video_tokens import Clock, Grid, Place, heard_tokens
from omni_cluster.models.thinker_session import SAMPLE_RATE_HZ, video_item
from omni_cluster.types.errors import RequestError

SOUND = "heard_features"
"""Mel frames of the videos' sound, `[mel bins, frames]`; beside it `SOUND_LENGTHS`, the frames of each video."""
SOUND_LENGTHS = "heard_lengths"
IS_SOUND = "is_heard"
"""Which of a video's tokens are its sound's, bool."""


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
        video = video_item(largest_video(seq_len), fps=2.0, audio=None)
        return {**data, "video": [video] * mm_counts.get("video", 0)}


class ThinkerProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """Its outputs are vLLM's, and the `SOUND` fields for videos that are heard."""

    info: ThinkerProcessingInfo

    def _get_hf_mm_inputs(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> HFMultiModalInputs:
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        if "videos" in inputs.hf_data:
            inputs.hf_data["videos"] = [frames for frames, _ in _videos(mm_items)]
        return inputs

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        processed = self._processed(mm_items, hf_kwargs)
        videos = _videos(mm_items)
        if videos:
            step_frames = self.info.get_hf_config().vision_config.temporal_patch_size
            # float64: the token ids go by it; transformers' positions go by its float32.
            steps_s = [step_frames / how["fps"] for _, how in videos]
            processed["second_per_grid_ts"] = torch.tensor(steps_s, dtype=torch.float64)
            processed.update(self._heard([how["audio"] for _, how in videos], processed))
        return processed

    def _processed(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """As transformers' processor makes it, without what it would do for nothing."""
        context, processor = self.info.ctx, self.info.get_hf_processor()
        images = mm_items["image"].get_all() if "image" in mm_items else []
        seen = [*images, *(frames for frames, _ in _videos(mm_items))]
        as_bytes = pixels.options_of(processor, seen, context.get_merged_mm_kwargs(hf_kwargs))
        options = {**hf_kwargs, **self.info.audio_padding(mm_items), **as_bytes}
        processed = super()._apply_hf_processor_main(mm_items, options)
        _check_finite(processed)
        if as_bytes:
            pixels.normalize(processed, processor, context.model_config.dtype)
        return processed

    def _heard(self, audios: Sequence[Any], processed: BatchFeature) -> dict[str, torch.Tensor]:
        """The fields of the videos' sound; none for videos without."""
        if any(audio is None for audio in audios):
            return {}
        items = self.info.parse_mm_data({"audio": [(audio, SAMPLE_RATE_HZ) for audio in audios]}, validate=False)
        features = self._processed(items, {})
        lengths = features["audio_feature_lengths"]
        grids = self._grids(processed["video_grid_thw"], processed["second_per_grid_ts"])
        clock = Clock.of(self.info.get_hf_config())
        orders = [heard_tokens(g, _tokens_of(n), clock) for g, n in zip(grids, lengths, strict=True)]
        return {
            SOUND: features["input_audio_features"],
            SOUND_LENGTHS: lengths,
            IS_SOUND: torch.cat([torch.from_numpy(order) for order in orders]),
        }

    def _grids(self, sizes: torch.Tensor, steps_s: torch.Tensor) -> list[Grid]:
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        return [_grid(size, merge, float(step_s)) for size, step_s in zip(sizes, steps_s, strict=True)]

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        if SOUND in hf_inputs:
            lengths = hf_inputs[SOUND_LENGTHS]
            grids = self._grids(hf_inputs["video_grid_thw"], hf_inputs["second_per_grid_ts"])
            sizes = [grid.length + _tokens_of(n) for grid, n in zip(grids, lengths, strict=True)]
            fields[SOUND] = MultiModalFieldConfig.flat_from_sizes("video", lengths, dim=1)
            fields[SOUND_LENGTHS] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
            fields[IS_SOUND] = MultiModalFieldConfig.flat_from_sizes("video", torch.tensor(sizes), keep_on_cpu=True)
        return fields

    def _maybe_apply_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        # Past vLLM's own for this model, which looks for sound items without places of their own.
        return super(Qwen2_5OmniThinkerMultiModalProcessor, self)._maybe_apply_prompt_updates(*args, **kwargs)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        config, videos = self.info.get_hf_config(), out_mm_kwargs.get("video", [])
        if not any(SOUND in item for item in videos):
            return updates

        def heard(index: int) -> PromptUpdateDetails:
            seen, sound = config.video_token_index, config.audio_token_index
            item = videos[index]
            tokens = torch.where(item[IS_SOUND].data, sound, seen).tolist()
            marked = [config.audio_start_token_id, *tokens, config.audio_end_token_id]
            return PromptUpdateDetails.select_token_ids(marked, [seen, sound])

        in_videos = PromptReplacement("video", [config.video_token_index], heard)
        return [in_videos if update.modality == "video" else update for update in updates]


def _check_finite(processed: BatchFeature) -> None:
    """Raises RequestError for sound whose energy is beyond float32. Pixels are bytes: theirs are always finite."""
    features = processed.get("input_audio_features")
    if features is not None and not features.sum(dtype=torch.float64).isfinite():
        raise RequestError("a sound has samples of more energy than can be computed with; send samples from -1 to 1.")


def largest_video(tokens: int) -> np.ndarray:
    """Frames uint8 `[T, H, W, 3]` that come to `tokens`, or little less; no frame is larger to the processor."""
    height, width = 24, 32
    pairs = max(1, tokens // (height * width))
    return np.zeros((2 * pairs, 28 * height, 28 * width, 3), np.uint8)


def _tokens_of(mel_frames: torch.Tensor) -> int:
    """Of a video's sound. RequestError for one too short to have any."""
    tokens = sound_tokens(int(mel_frames))
    if tokens < 1:
        raise RequestError("the audio of a video is too short; leave it out, or send at least 0.1 s of it.")
    return tokens


def places(features: Sequence[MultiModalFeatureSpec], merge: int) -> list[Place]:
    """Where media stand in a prompt, of vLLM's records of them in any order."""
    return sorted((_place(feature, merge) for feature in features), key=lambda place: place.offset)


def _place(feature: MultiModalFeatureSpec, merge: int) -> Place:
    offset, length, data = feature.mm_position.offset, feature.mm_position.length, feature.data
    if feature.modality == "image":
        return Place(offset, length, _grid(data["image_grid_thw"].data, merge))
    if feature.modality == "video":
        grid = _grid(data["video_grid_thw"].data, merge, float(data["second_per_grid_ts"].data))
        heard = int(data[IS_SOUND].data.sum()) if IS_SOUND in data else 0
        return Place(offset, length, grid, heard)
    return Place(offset, length)


def _grid(patches: torch.Tensor, merge: int, step_s: float = 1.0) -> Grid:
    steps, rows, columns = patches.tolist()
    return Grid(steps, rows // merge, columns // merge, step_s)


def _videos(mm_items: MultiModalDataItems) -> list[Any]:
    """Frames and what goes with them, of each video."""
    return mm_items["video"].get_all() if "video" in mm_items else []
