"""The thinker's media on their way into vLLM: its own processor, but for sounds and videos.

vLLM 0.32 fills a sound up to a whole step of the mel filter, which makes a frame more than transformers does. It takes
one frame rate for all videos of a request, and makes a video that is heard of two items that overlap in the prompt: its
encoder cache, prefix cache and chunked prefill are made for items that follow each other. Here a video is one item,
which has its frame rate and its sound with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

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
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing.processor import (
    HFMultiModalInputs,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from omni_cluster.models import pixels
from omni_cluster.models.qwen3_omni.thinker_stage import AUDIO_ITEM_TOKENS
from omni_cluster.models.qwen3_omni.video_tokens import Grid, Place, heard_tokens
from omni_cluster.models.thinker_session import SAMPLE_RATE_HZ, video_item
from omni_cluster.types.errors import RequestError

SOUND: Final = "heard_features"
"""Mel frames of the videos' sound, `[mel bins, frames]`; beside it `SOUND_LENGTHS`, the frames of each video."""
SOUND_LENGTHS: Final = "heard_lengths"
IS_SOUND: Final = "is_heard"
"""Which of a video's tokens are its sound's, bool."""
_FRAMES_PER_CHUNK, _TOKENS_PER_CHUNK = 100, 13
"""Mel frames that the audio tower convolves at a time, and the tokens that it makes of them."""
_LARGEST_FRAME: Final = (24, 32)
"""Rows and columns of tokens; no frame is larger to the processor."""


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


class ThinkerProcessor(Qwen3OmniMoeThinkerMultiModalProcessor):
    """Its outputs are vLLM's, and the `SOUND` fields for videos that are heard."""

    info: ThinkerProcessingInfo

    def _get_hf_mm_inputs(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> HFMultiModalInputs:
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        if "videos" in inputs.hf_data:
            inputs.hf_data["videos"] = [frames for frames, _ in _videos(mm_items)]
        return inputs

    def _apply_hf_processor_main(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        processed = self._seen(mm_items, hf_kwargs)
        if "audio" in mm_items:
            processed.update(self._sounds(mm_items["audio"].get_all()))
        videos = _videos(mm_items)
        if videos:
            step_frames = self.info.get_hf_config().vision_config.temporal_patch_size
            # float64: the token ids go by it; transformers' positions go by its float32.
            steps_s = [step_frames / how["fps"] for _, how in videos]
            processed["second_per_grid_ts"] = torch.tensor(steps_s, dtype=torch.float64)
            processed.update(self._heard([how["audio"] for _, how in videos], processed))
        return processed

    def _seen(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """Images and videos as transformers' processor makes them, without what it would do for nothing."""
        context, processor = self.info.ctx, self.info.get_hf_processor()
        seen = MultiModalDataItems({kind: mm_items[kind] for kind in ("image", "video") if kind in mm_items})
        images = seen["image"].get_all() if "image" in seen else []
        pictures = [*images, *(frames for frames, _ in _videos(seen))]
        as_bytes = pixels.options_of(processor, pictures, context.get_merged_mm_kwargs(hf_kwargs))
        processed = super()._apply_hf_processor_main(seen, {**hf_kwargs, **as_bytes})
        if as_bytes:
            pixels.normalize(processed, processor, context.model_config.dtype)
        return processed

    def _sounds(self, sounds: Sequence[np.ndarray]) -> dict[str, Any]:
        """Mel frames of sounds, each as transformers' processor makes them of it alone.

        It fills sounds of one prompt up to the longest, and then counts a frame more of those that end within one.
        """
        features = [self._mel(sound) for sound in sounds]
        lengths = [each.shape[1] for each in features]
        return {
            "input_audio_features": torch.cat(features, dim=1),
            "audio_feature_lengths": torch.tensor(lengths),
            "feature_attention_mask": [torch.ones(length) for length in lengths],
        }

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

    def _heard(self, audios: Sequence[Any], processed: BatchFeature) -> dict[str, torch.Tensor]:
        """The fields of the videos' sound; none for videos without."""
        if any(audio is None for audio in audios):
            return {}
        made = self._sounds(audios)
        lengths = made["audio_feature_lengths"]
        grids = self._grids(processed["video_grid_thw"], processed["second_per_grid_ts"])
        ticks = self.info.get_hf_config().position_id_per_seconds
        orders = [heard_tokens(g, sound_tokens(int(n)), ticks) for g, n in zip(grids, lengths, strict=True)]
        return {
            SOUND: made["input_audio_features"],
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
            sizes = [grid.length + sound_tokens(int(n)) for grid, n in zip(grids, lengths, strict=True)]
            fields[SOUND] = MultiModalFieldConfig.flat_from_sizes("video", lengths, dim=1)
            fields[SOUND_LENGTHS] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
            fields[IS_SOUND] = MultiModalFieldConfig.flat_from_sizes("video", torch.tensor(sizes), keep_on_cpu=True)
        return fields

    def _maybe_apply_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        # Past vLLM's own for these models, which look for sound items without places of their own.
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
            seen, sound = config.video_token_id, config.audio_token_id
            tokens = torch.where(videos[index][IS_SOUND].data, sound, seen).tolist()
            marked = [config.audio_start_token_id, *tokens, config.audio_end_token_id]
            return PromptUpdateDetails.select_token_ids(marked, [seen, sound])

        in_videos = PromptReplacement("video", [config.video_token_id], heard)
        return [in_videos if update.modality == "video" else update for update in updates]


def sound_tokens(mel_frames: int) -> int:
    """What the audio tower makes of so many frames: three convolutions of a chunk take every second one."""
    chunks, rest = divmod(mel_frames, _FRAMES_PER_CHUNK)
    for _ in range(3):
        rest = (rest + 1) // 2
    return chunks * _TOKENS_PER_CHUNK + rest


def largest_video(tokens: int, side: int) -> np.ndarray:
    """Frames uint8 `[T, H, W, 3]` that come to `tokens` of `side` x `side` pixels, or little less."""
    rows, columns = _LARGEST_FRAME
    pairs = max(1, tokens // (rows * columns))
    return np.zeros((2 * pairs, side * rows, side * columns, 3), np.uint8)


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
