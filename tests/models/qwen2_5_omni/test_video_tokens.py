"""Order and positions against transformers' own, for prompts that no checkpoint's processor would make soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniPreTrainedModelForConditionalGeneration
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

from omni_cluster.models.qwen2_5_omni.video_tokens import Clock, heard_tokens, prompt_positions
from omni_cluster.models.thinkers.media_places import Grid, Place

CLOCK = Clock(25, 50)
MERGE = 2
TEXT, AUDIO, IMAGE, VIDEO, VISION_BOS, VISION_EOS, AUDIO_BOS, AUDIO_EOS = range(8)
MARKS = {"audio": (AUDIO_BOS, AUDIO_EOS), "image": (VISION_BOS, VISION_EOS), "video": (VISION_BOS, VISION_EOS)}


class Reference(Qwen2_5OmniPreTrainedModelForConditionalGeneration):
    """transformers' positions without a model: all that they read of one."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.spatial_merge_size = MERGE
        self.config = SimpleNamespace(
            audio_token_id=AUDIO, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_BOS,
            audio_start_token_id=AUDIO_BOS, position_id_per_seconds=25, seconds_per_chunk=2,
        )  # type: ignore[assignment]  # fmt: skip


def processor_order(grid: Grid, heard: int) -> list[bool]:
    """Which tokens are sound, by transformers' processor."""
    names = {
        "audio_token": "A", "video_token": "V", "image_token": "I",
        "vision_bos_token": "<", "vision_eos_token": ">", "audio_bos_token": "(", "audio_eos_token": ")",
    }  # fmt: skip
    # Its tokenizer and its encoders' processors play no part in it.
    made = Qwen2_5OmniProcessor.__new__(Qwen2_5OmniProcessor)
    sizes = SimpleNamespace(merge_size=MERGE)
    made.__dict__.update(names, image_processor=sizes, video_processor=sizes)
    thw = torch.tensor([grid.steps, grid.rows * MERGE, grid.columns * MERGE])
    (text,) = made.replace_multimodal_special_tokens(
        ["<V>"], iter([heard]), iter([]), iter([thw]), iter([grid.step_s]), True, 25, 2.0
    )
    return [letter == "A" for letter in text if letter in "AV"]


grids = st.builds(
    Grid,
    steps=st.integers(1, 12),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    step_s=st.floats(0.05, 40).map(lambda fps: 2 / fps),
)


@settings(deadline=None)  # the reference takes its time
@given(grids, st.integers(1, 400))
@example(Grid(8, 1, 1, 2 / 3.0), 130)  # steps that end on a chunk's edge, or just before it
@example(Grid(3, 2, 2, 10.0), 200)  # steps that skip chunks
def test_frames_and_sound_take_turns_as_in_the_processor(grid: Grid, heard: int) -> None:
    assert heard_tokens(grid, heard, CLOCK).tolist() == processor_order(grid, heard)


def prompt(items: list[tuple[str, Grid, int, int]], heard: bool) -> tuple[list[int], list[Place], dict[str, Any]]:
    """A prompt's token ids, the places of its media, and what transformers wants to know of them."""
    ids, places = [TEXT] * 3, []
    sizes: dict[str, Any] = {"image": [], "video": [], "audio": [], "steps_s": []}
    for kind, grid, sound, text in items:
        bos, eos = MARKS[kind]
        ids.append(bos)
        offset = len(ids)
        if kind == "audio":
            ids += [AUDIO] * sound
            places.append(Place(offset, sound))
        else:
            grid = Grid(1, grid.rows, grid.columns) if kind == "image" else grid
            sizes[kind].append([grid.steps, grid.rows * MERGE, grid.columns * MERGE])
            is_heard = heard and kind == "video"
            if is_heard:
                turns = heard_tokens(grid, sound, CLOCK)
                ids += [AUDIO_BOS, *np.where(turns, AUDIO, VIDEO).tolist(), AUDIO_EOS]
            else:
                ids += [IMAGE if kind == "image" else VIDEO] * grid.length
            places.append(Place(offset, len(ids) - offset, grid, sound if is_heard else 0))
        if kind == "video":
            sizes["steps_s"].append(grid.step_s)
        if kind == "audio" or (heard and kind == "video"):
            sizes["audio"].append(4 * sound - 1)  # mel frames of that many tokens
        ids += [eos] + [TEXT] * text
    return [*ids, TEXT], places, sizes


items = st.tuples(st.sampled_from(["audio", "image", "video"]), grids, st.integers(1, 160), st.integers(0, 3))


@settings(deadline=None)  # the reference takes its time
@given(st.lists(items, min_size=1, max_size=5), st.booleans())
@example([("video", Grid(2, 2, 2, 10.0), 112, 2), ("image", Grid(1, 2, 3), 1, 0)], True)  # frames outlast all
def test_positions_are_those_of_transformers(chosen: list[tuple[str, Grid, int, int]], heard: bool) -> None:
    ids, places, sizes = prompt(chosen, heard)
    made = prompt_positions(len(ids), places, CLOCK)
    if not sizes["image"] and not sizes["video"]:
        assert np.array_equal(made, np.broadcast_to(np.arange(len(ids)), (3, len(ids))))
        return
    wanted, _ = Reference().get_rope_index(
        torch.tensor([ids]), torch.tensor(sizes["image"]), torch.tensor(sizes["video"]), torch.ones(1, len(ids)),
        heard, torch.tensor(sizes["audio"]), torch.tensor(sizes["steps_s"]),
    )  # fmt: skip
    assert made.dtype == np.int64 and np.array_equal(made, wanted[:, 0].numpy())


def test_a_video_at_the_very_start_has_no_position_below_zero() -> None:
    grid = Grid(1, 2, 2)
    assert prompt_positions(9, [Place(0, 8, grid, heard=2)], CLOCK).min() == 0


def test_positions_of_a_prompt_without_media_are_its_numbers() -> None:
    assert np.array_equal(prompt_positions(4, [], CLOCK), np.broadcast_to(np.arange(4), (3, 4)))
