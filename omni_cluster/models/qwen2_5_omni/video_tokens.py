"""Order and positions of a prompt's tokens where it has videos, as transformers' Qwen2.5-Omni makes them.

A video that is heard has its frames' and its sound's tokens in turn, a chunk of two seconds each. transformers cuts the
chunks twice, in float64 for the token ids (`Qwen2_5OmniProcessor.replace_multimodal_special_tokens`) and in whole
float32 ticks for the positions (`get_rope_index`); both are done here as they are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_cluster.models.thinkers.media_places import Grid, Place


@dataclass(frozen=True, slots=True)
class Clock:
    """How the model tells time: temporal positions of a second, and of a chunk."""

    ticks_per_second: float
    ticks_per_chunk: int

    @classmethod
    def of(cls, thinker_config: Any) -> Clock:
        ticks = thinker_config.position_id_per_seconds
        return cls(ticks, int(ticks * thinker_config.seconds_per_chunk))


def heard_tokens(grid: Grid, heard: int, clock: Clock) -> np.ndarray:
    """Which tokens of a video with `heard` tokens of sound are the sound's, bool `[grid.length + heard]`."""
    order, _ = _in_turn(_ticks(grid, clock), heard, clock)
    return order >= grid.length


def _ticks(grid: Grid, clock: Clock) -> np.ndarray:
    """The start of each token's step, float64 `[length]`."""
    return np.repeat(np.arange(grid.steps) * grid.step_s * clock.ticks_per_second, grid.rows * grid.columns)


def _grid_positions(grid: Grid, clock: Clock) -> np.ndarray:
    """int64 `[3, length]`, from zero on: time in whole ticks, row, column."""
    steps = np.arange(grid.steps, dtype=np.float32) * np.float32(grid.step_s) * np.float32(clock.ticks_per_second)
    axes = np.meshgrid(steps.astype(np.int64), np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])


def prompt_positions(length: int, places: Iterable[Place], clock: Clock) -> np.ndarray:
    """M-RoPE positions of a prompt of `length` tokens whose media stand at `places`, in their order: int64 `[3, n]`."""
    parts: list[np.ndarray] = []
    end = following = 0
    for place in places:
        parts.append(_line(following, place.offset - end))
        following += place.offset - end
        positions, following = _positions(place, following, clock)
        parts.append(positions)
        end = place.offset + place.length
    return np.concatenate([*parts, _line(following, length - end)], axis=1)


def _positions(place: Place, start: int, clock: Clock) -> tuple[np.ndarray, int]:
    """Positions of the tokens of a place that begins at position `start`, and the position after it."""
    if place.grid is None:
        return _line(start, place.length), start + place.length
    seen = _grid_positions(place.grid, clock) + start
    if place.heard == 0:
        return seen, int(seen.max()) + 1
    order, last_chunk = _in_turn(seen[0] - start, place.heard, clock)
    both = np.concatenate([seen, _line(start, place.heard)], axis=1)[:, order]
    # The marks of sound share a position with those of vision that they stand beside. What follows goes by the last
    # chunk, whatever the chunks before it came to.
    following = int(both[:, last_chunk:].max()) + 1
    return np.concatenate([_line(max(start - 1, 0), 1), both, _line(following, 1)], axis=1), following


def _in_turn(ticks: np.ndarray, heard: int, clock: Clock) -> tuple[np.ndarray, int]:
    """The order of frames' tokens at `ticks` and `heard` tokens of sound after them, and where its last chunk begins.

    A chunk begins at the first token of its time, and no token begins two: after a gap the next ones begin the others.
    """
    due = ticks // clock.ticks_per_chunk
    index = np.arange(len(ticks))
    seen = np.minimum.accumulate(due - index) + index
    chunks = np.concatenate([2 * seen, 2 * (np.arange(heard) // clock.ticks_per_chunk) + 1])
    order = np.argsort(chunks, kind="stable")
    return order, int(np.searchsorted(chunks[order], chunks.max()))


def _line(start: int, length: int) -> np.ndarray:
    """Positions of text and sound: int64 `[3, length]`, one after the other."""
    return np.broadcast_to(np.arange(start, start + length), (3, length))
