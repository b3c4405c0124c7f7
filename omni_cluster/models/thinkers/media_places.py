"""Where media stand in a prompt of a thinker, and how their tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

IS_SOUND: Final = "is_heard"
"""The field of a video that is heard: which of its tokens are its sound's, bool."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Tokens of an image or a video, `steps` in time, each of `rows` x `columns`, `step_s` seconds apart."""

    steps: int
    rows: int
    columns: int
    step_s: float = 1.0

    @classmethod
    def of(cls, patches: torch.Tensor, merge: int, step_s: float = 1.0) -> Grid:
        """Of a processor's steps, rows and columns of patches, `merge` x `merge` of which are a token."""
        steps, rows, columns = patches.tolist()
        return cls(steps, rows // merge, columns // merge, step_s)

    @property
    def length(self) -> int:
        return self.steps * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Place:
    """Media tokens of a prompt, `length` of them from `offset` on.

    `grid`: of an image or a video, None for sound. `heard`: how many tokens of a video are its sound's; with its two
    marks they are all of its `length` that is not the grid's.
    """

    offset: int
    length: int
    grid: Grid | None = None
    heard: int = 0

    @classmethod
    def of(cls, feature: MultiModalFeatureSpec, merge: int) -> Place:
        """Of vLLM's record of an item."""
        offset, length, data = feature.mm_position.offset, feature.mm_position.length, feature.data
        if feature.modality == "image":
            return cls(offset, length, Grid.of(data["image_grid_thw"].data, merge))
        if feature.modality == "video":
            grid = Grid.of(data["video_grid_thw"].data, merge, float(data["second_per_grid_ts"].data))
            heard = int(data[IS_SOUND].data.sum()) if IS_SOUND in data else 0
            return cls(offset, length, grid, heard)
        return cls(offset, length)


def places(features: Sequence[MultiModalFeatureSpec], merge: int) -> list[Place]:
    """Of vLLM's records of a prompt's media, in any order; sorted by where they stand."""
    return sorted((Place.of(feature, merge) for feature in features), key=lambda place: place.offset)
