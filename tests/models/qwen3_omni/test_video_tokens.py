"""Order and positions against transformers' own, for prompts that no checkpoint's processor would make soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from omni_cluster.models.qwen3_omni.fine_positions import as_floats, packed, packed_delta, unpacked, whole
from omni_cluster.models.qwen3_omni.video_tokens import heard_tokens, prompt_positions
from omni_cluster.models.thinkers.media_places import Grid, Place

TICKS = 13
MERGE = 2
TEXT, AUDIO, IMAGE, VIDEO, VISION_BOS, VISION_EOS, AUDIO_BOS, AUDIO_EOS = range(8)
MARKS = {"audio": (AUDIO_BOS, AUDIO_EOS), "image": (VISION_BOS, VISION_EOS), "video": (VISION_BOS, VISION_EOS)}


class Reference(Qwen3OmniMoePreTrainedModelForConditionalGeneration):
    """transformers' positions without a model: all that they read of one."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.spatial_merge_size = MERGE
        self.config = SimpleNamespace(
            audio_token_id=AUDIO, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_BOS,
            audio_start_token_id=AUDIO_BOS, position_id_per_seconds=TICKS, audio_config=SimpleNamespace(n_window=50),
        )  # type: ignore[assignment]  # fmt: skip


def processor_order(grid: Grid, heard: int) -> list[bool]:
    """Which tokens are sound, by transformers' processor."""
    names = {
        "audio_token": "A", "video_token": "V", "image_token": "I",
        "vision_bos_token": "<", "vision_eos_token": ">", "audio_bos_token": "(", "audio_eos_token": ")",
    }  # fmt: skip
    # Its tokenizer and its encoders' processors play no part in it.
    made = Qwen3OmniMoeProcessor.__new__(Qwen3OmniMoeProcessor)
    sizes = SimpleNamespace(merge_size=MERGE)
    made.__dict__.update(names, image_processor=sizes, video_processor=sizes)
    thw = torch.tensor([grid.steps, grid.rows * MERGE, grid.columns * MERGE])
    (text,) = made.replace_multimodal_special_tokens(
        ["<V>"], iter([heard]), iter([]), iter([thw]), iter([grid.step_s]), True, 13.0, 2.0
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
@example(Grid(8, 1, 1, 2 / 1.5), 130)
@example(Grid(3, 2, 2, 10.0), 20)  # frames that outlast their sound
def test_frames_and_sound_take_turns_as_in_the_processor(grid: Grid, heard: int) -> None:
    assert heard_tokens(grid, heard, TICKS).tolist() == processor_order(grid, heard)


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
                turns = heard_tokens(grid, sound, TICKS)
                ids += [AUDIO_BOS, *np.where(turns, AUDIO, VIDEO).tolist(), AUDIO_EOS]
            else:
                ids += [IMAGE if kind == "image" else VIDEO] * grid.length
            places.append(Place(offset, len(ids) - offset, grid, sound if is_heard else 0))
        if kind == "video":
            sizes["steps_s"].append(grid.step_s)
        if kind == "audio" or (heard and kind == "video"):
            sizes["audio"].append(mel_frames(sound))
        ids += [eos] + [TEXT] * text
    return [*ids, TEXT], places, sizes


def mel_frames(tokens: int) -> int:
    """Of so many tokens: 13 are made of a hundred frames, each of eight at most."""
    hundreds, rest = divmod(tokens, 13)
    return 100 * hundreds + (8 * rest - 7 if rest else 0)


items = st.tuples(st.sampled_from(["audio", "image", "video"]), grids, st.integers(1, 160), st.integers(0, 3))


@settings(deadline=None)  # the reference takes its time
@given(st.lists(items, min_size=1, max_size=5), st.booleans())
@example([("video", Grid(2, 3, 3, 2 / 1.5), 2, 2), ("image", Grid(1, 2, 3), 1, 0)], True)  # rows outlast the sound
@example([("video", Grid(9, 1, 2, 2 / 1.5), 9, 0), ("video", Grid(4, 1, 1, 2 / 0.7), 9, 3)], False)
def test_positions_are_those_of_transformers(chosen: list[tuple[str, Grid, int, int]], heard: bool) -> None:
    ids, places, sizes = prompt(chosen, heard)
    made = prompt_positions(len(ids), places, TICKS)
    assert made.dtype == np.float32
    if not sizes["image"] and not sizes["video"]:
        assert np.array_equal(made, np.broadcast_to(np.arange(len(ids)), (3, len(ids))))
        return
    wanted, delta = Reference().get_rope_index(
        torch.tensor([ids]), torch.tensor(sizes["image"]), torch.tensor(sizes["video"]), torch.ones(1, len(ids)),
        heard, torch.tensor(sizes["audio"]), torch.tensor(sizes["steps_s"]),
    )  # fmt: skip
    assert np.array_equal(made, wanted[:, 0].numpy())
    assert made.max() + np.float32(1) - np.float32(len(ids)) == float(delta)


def test_positions_of_a_prompt_without_media_are_its_numbers() -> None:
    assert np.array_equal(prompt_positions(4, [], TICKS), np.broadcast_to(np.arange(4), (3, 4)))


@pytest.mark.parametrize("first", [0.0, 1 / 128, 17 + 1 / 3, 0.1, 65_535.998])
def test_a_packed_position_is_itself_and_one_more_is_the_next(first: float) -> None:
    positions = np.array([first, first + 7], np.float32)
    numbers = packed(positions)
    assert np.array_equal(unpacked(torch.from_numpy(numbers)).numpy(), positions)
    assert np.array_equal(as_floats(numbers), positions)
    assert whole(torch.from_numpy(numbers)).tolist() == np.floor(positions).tolist()
    following = unpacked(torch.from_numpy(numbers + 5)).numpy()
    assert np.array_equal(following, (np.floor(positions) + 5) + (positions - np.floor(positions)))


def test_a_distance_to_what_follows_may_be_below_zero() -> None:
    """As vLLM counts: of the position behind a prompt, less the prompt's length, plus a token's number."""
    behind = packed_delta(np.array([[0, 4.25]] * 3, np.float32).repeat(50, axis=1))
    assert unpacked(torch.tensor([behind + 100, behind + 103])).tolist() == [5.25, 8.25]


def test_what_follows_goes_on_behind_the_last_position_however_far_media_reach() -> None:
    """As `generate` of transformers counts: columns of a wide video may be behind the text that ends the prompt."""
    positions = np.array([[0, 30, 7.25]] * 3, np.float32)
    assert unpacked(torch.tensor([packed_delta(positions) + 3, packed_delta(positions) + 5])).tolist() == [8.25, 10.25]
