"""Videos on their way into vLLM, each one item with its frame rate and its sound.

vLLM 0.32 takes one frame rate for all videos of a request, and makes a video that is heard of two items that overlap in
the prompt: its encoder cache, prefix cache and chunked prefill are made for items that follow each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    HFMultiModalInputs,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from omni_cluster.models.thinkers.media_places import IS_SOUND, Grid

SOUND: Final = "heard_features"
"""Mel frames of the videos' sound, `[mel bins, frames]`; beside it `SOUND_LENGTHS`, the frames of each video."""
SOUND_LENGTHS: Final = "heard_lengths"
LARGEST_FRAME: Final = (24, 32)
"""Rows and columns of tokens; no frame is larger to the processors."""


class HeardVideoItems(BaseMultiModalProcessor[Any]):
    """Stands before vLLM's processor of a thinker: outputs are that one's, and the `SOUND` fields of heard videos."""

    @abstractmethod
    def mel_of(self, sounds: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mel frames of sounds, `[mel bins, frames]`, and how many each has. RequestError for what has none."""

    @abstractmethod
    def sound_tokens(self, mel_frames: int) -> int:
        """What the audio tower makes of so many frames of a video's sound. RequestError for too few."""

    @abstractmethod
    def is_sound(self, grid: Grid, sound_tokens: int) -> np.ndarray:
        """Which tokens of a video that is heard are its sound's, in their order: bool `[length]`."""

    @property
    @abstractmethod
    def video_and_sound_ids(self) -> tuple[int, int]:
        """The tokens of the prompt that stand for frames and for sound."""

    def add_videos(self, processed: BatchFeature, mm_items: MultiModalDataItems) -> BatchFeature:
        """What transformers' processor made, with the fields of videos that it does not know."""
        if videos := videos_of(mm_items):
            step_frames = self.info.get_hf_config().vision_config.temporal_patch_size
            # float64: the token ids go by it; transformers' positions go by its float32.
            steps_s = [step_frames / how["fps"] for _, how in videos]
            processed["second_per_grid_ts"] = torch.tensor(steps_s, dtype=torch.float64)
            processed.update(self._heard([how["audio"] for _, how in videos], processed))
        return processed

    def _heard(self, sounds: Sequence[Any], processed: BatchFeature) -> dict[str, torch.Tensor]:
        """The fields of the videos' sound; none for videos without."""
        if any(sound is None for sound in sounds):
            return {}
        mel, lengths = self.mel_of(sounds)
        counts = [self.sound_tokens(int(frames)) for frames in lengths]
        orders = [self.is_sound(grid, count) for grid, count in zip(self._grids(processed), counts, strict=True)]
        return {
            SOUND: mel,
            SOUND_LENGTHS: lengths,
            IS_SOUND: torch.cat([torch.from_numpy(order) for order in orders]),
        }

    def _grids(self, fields: BatchFeature) -> list[Grid]:
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        sizes, steps_s = fields["video_grid_thw"], fields["second_per_grid_ts"]
        return [Grid.of(size, merge, float(step_s)) for size, step_s in zip(sizes, steps_s, strict=True)]

    def _get_hf_mm_inputs(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> HFMultiModalInputs:
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        if "videos" in inputs.hf_data:
            inputs.hf_data["videos"] = [frames for frames, _ in videos_of(mm_items)]
        return inputs

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        if SOUND in hf_inputs:
            lengths = hf_inputs[SOUND_LENGTHS]
            counts = [self.sound_tokens(int(frames)) for frames in lengths]
            sizes = [grid.length + count for grid, count in zip(self._grids(hf_inputs), counts, strict=True)]
            fields[SOUND] = MultiModalFieldConfig.flat_from_sizes("video", lengths, dim=1)
            fields[SOUND_LENGTHS] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
            fields[IS_SOUND] = MultiModalFieldConfig.flat_from_sizes("video", torch.tensor(sizes), keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        videos: Sequence[Any] = out_mm_kwargs.get("video", [])
        if not any(SOUND in item for item in videos):
            return updates
        seen, sound = self.video_and_sound_ids

        def heard(index: int) -> PromptUpdateDetails:
            config = self.info.get_hf_config()
            tokens = torch.where(videos[index][IS_SOUND].data, sound, seen).tolist()
            marked = [config.audio_start_token_id, *tokens, config.audio_end_token_id]
            return PromptUpdateDetails.select_token_ids(marked, [seen, sound])

        in_videos = PromptReplacement("video", [seen], heard)
        return [in_videos if update.modality == "video" else update for update in updates]


def videos_of(mm_items: MultiModalDataItems) -> list[Any]:
    """Frames and what goes with them, of each video."""
    return mm_items["video"].get_all() if "video" in mm_items else []


def largest_video(tokens: int, side: int) -> np.ndarray:
    """Frames uint8 `[T, H, W, 3]` that come to `tokens` of `side` x `side` pixels, or little less."""
    rows, columns = LARGEST_FRAME
    pairs = max(1, tokens // (rows * columns))
    return np.zeros((2 * pairs, side * rows, side * columns, 3), np.uint8)


def in_prompt_order(
    seen: Sequence[torch.Tensor], heard: Sequence[torch.Tensor], is_sound: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Embeddings `[V + A, H]` of each video, of its frames' `[V, H]`, its sound's `[A, H]`, and which are whose."""
    lengths = [v.shape[0] + a.shape[0] for v, a in zip(seen, heard, strict=True)]
    made = []
    for frames, sound, mask in zip(seen, heard, is_sound.split(lengths), strict=True):
        # Where each token's embedding is, among the frames' and then the sound's.
        sources = torch.where(mask, frames.shape[0] + mask.cumsum(0) - 1, (~mask).cumsum(0) - 1)
        made.append(torch.cat([frames, sound])[sources.to(frames.device)])
    return tuple(made)
