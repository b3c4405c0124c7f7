"""Order and positions of a prompt's tokens where it has media, as transformers' Qwen3-Omni makes them.

A video that is heard has its frames' and its sound's tokens in turn, each where its time is. transformers finds the
order twice, in float64 for the token ids (`Qwen3OmniMoeProcessor.replace_multimodal_special_tokens`) and in float32
for the positions (`get_rope_index`); both are done here as they are there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from omni_cluster.models.thinkers.media_places import Grid, Place


def heard_tokens(grid: Grid, heard: int, ticks_per_second: float) -> np.ndarray:
    """Which tokens of a video with `heard` tokens of sound are the sound's, bool `[grid.length + heard]`."""
    return _in_turn(_ticks(grid, ticks_per_second), np.arange(heard, dtype=np.float64)) >= grid.length


def _ticks(grid: Grid, ticks_per_second: float) -> np.ndarray:
    """The start of each token's step, float64 `[length]`."""
    return np.repeat(np.arange(grid.steps) * grid.step_s * ticks_per_second, grid.rows * grid.columns)


def _grid_positions(grid: Grid, ticks_per_second: float) -> np.ndarray:
    """float32 `[3, length]`, from zero on: time in ticks, row, column."""
    steps = np.arange(grid.steps, dtype=np.float32) * np.float32(grid.step_s) * np.float32(ticks_per_second)
    rows, columns = np.arange(grid.rows, dtype=np.float32), np.arange(grid.columns, dtype=np.float32)
    axes = np.meshgrid(steps, rows, columns, indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])


def prompt_positions(length: int, places: Iterable[Place], ticks_per_second: float) -> np.ndarray:
    """M-RoPE positions of a prompt of `length` tokens whose media stand at `places`, in their order: float32 `[3, n]`.

    Each place stands between two marks. What is sampled goes on behind the last position.
    """
    parts: list[np.ndarray] = []
    end, following = 0, np.float32(0)
    for place in places:
        between, opening = _between(following, place.offset - end, closes=end > 0, opens=True)
        positions, following = _positions(place, opening, ticks_per_second)
        parts += [*between, positions]
        end = place.offset + place.length
    rest, _ = _between(following, length - end, closes=end > 0, opens=False)
    return np.concatenate([*parts, *rest], axis=1)


def _between(start: np.float32, length: int, *, closes: bool, opens: bool) -> tuple[list[np.ndarray], np.float32]:
    """Positions of the tokens between two places, and that of the last one, the mark that opens the second.

    Marks and text are added apart, as transformers does: sums of floats depend on it.
    """
    closing = int(closes and length > 0)
    opening = int(opens and length > closing)
    text = start + np.float32(closing)
    mark = text + np.float32(length - closing - opening)
    parts = [_line(start, closing), _line(text, length - closing - opening), _line(mark, opening)]
    return parts, mark if opening else mark - np.float32(1)


def _positions(place: Place, mark: np.float32, ticks_per_second: float) -> tuple[np.ndarray, np.float32]:
    """Positions of the tokens of a place behind a mark at position `mark`, and the position after it."""
    start = mark + np.float32(1 if place.heard == 0 else 2)
    if place.grid is None:
        sound = _line(start, place.length)
        return sound, sound.max(initial=mark) + np.float32(1)
    seen = _grid_positions(place.grid, ticks_per_second) + start
    if place.heard == 0:
        return seen, seen.max() + np.float32(1)
    heard = _line(start, place.heard)
    order = _in_turn(seen[0], heard[0])
    both = np.concatenate([seen, heard], axis=1)[:, order]
    # What follows goes by what is left of frames or sound once the other has ended, whatever came before.
    is_sound = order >= place.grid.length
    left = np.flatnonzero(is_sound != is_sound[-1])[-1] + 1
    following = both[:, left:].max() + np.float32(1)
    marked = [_line(mark + np.float32(1), 1), both, _line(following, 1)]
    return np.concatenate(marked, axis=1), following + np.float32(1)


def _in_turn(seen: np.ndarray, heard: np.ndarray) -> np.ndarray:
    """The order of frames' tokens at times `seen` and of sound's at `heard`; at one time the frames' is first."""
    return np.argsort(np.concatenate([seen, heard]), kind="stable")


def _line(start: np.float32, length: int) -> np.ndarray:
    """Positions of text and sound: float32 `[3, length]`, one after the other."""
    return np.broadcast_to(start + np.arange(length, dtype=np.float32), (3, length))
