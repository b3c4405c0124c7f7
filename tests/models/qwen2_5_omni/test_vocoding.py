from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.models.precision import products_in
from omni_cluster.models.qwen2_5_omni.bigvgan import Vocoder
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.models.qwen2_5_omni.vocoding import (
    GRAPH_FRAMES,
    MAX_PASS_FRAMES,
    Vocoding,
    graph_sizes,
    groups,
    large_sizes,
)

LENGTHS = (72, 40, 1, 96, 500, 73, 72, 400, 410, 432)


@given(st.lists(st.integers(1, 9000), max_size=60))
def test_every_window_is_in_one_pass_of_bounded_size(lengths: list[int]) -> None:
    made = groups(lengths)
    assert sorted(place for group in made for place in group) == list(range(len(lengths)))
    for group in made:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= MAX_PASS_FRAMES


class Seen:
    """A vocoder that keeps the shapes of its passes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, mels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert len(lengths) == len(mels)
        self.shapes.append((mels.shape[0], mels.shape[1]))
        return mels[..., 0]


@given(st.lists(st.integers(1, max(GRAPH_FRAMES)), max_size=80))
def test_windows_of_streams_have_no_pass_of_a_shape_that_was_never_run(lengths: list[int]) -> None:
    vocoding = Vocoding(cast(Vocoder, seen := Seen()), 80, torch.device("cpu"), captures=False)
    vocoding._fills = True
    waves = vocoding([torch.full((length, 80), float(length)) for length in lengths])
    assert [wave.tolist() for wave in waves] == [[float(length)] * length for length in lengths]
    of_a_graph = {shape for shape in seen.shapes if shape[0] * shape[1] <= max(b * n for b, n in graph_sizes())}
    assert {*seen.shapes} - of_a_graph <= {*large_sizes()}


def test_windows_of_like_lengths_share_a_pass() -> None:
    assert groups([72, 80, 60, 500, 96, 511]) == [[0, 2], [1, 4], [3, 5]]


Waves = list[torch.Tensor]


def made(folder: Path, device: str, *, captures: bool, fills: tuple[bool, ...] = (False,)) -> tuple[Waves, ...]:
    """The windows' waveforms each alone in a pass of its own, and together for each of `fills`."""
    place = torch.device(device)
    with torch.inference_mode(), products_in("float32"):
        vocoder = Vocoder(load_token2wav(folder, place).code2wav_bigvgan_model, place, torch.float32)
        generator = torch.Generator().manual_seed(3)
        windows = [torch.randn(length, 80, generator=generator).to(place) for length in LENGTHS]
        alone = [vocoder(w[None], torch.tensor([len(w)], dtype=torch.int32, device=place))[0] for w in windows]
        vocodings = [Vocoding(vocoder, 80, place, captures) for _ in fills]
        for vocoding, does_fill in zip(vocodings, fills, strict=True):
            vocoding._fills |= does_fill
        together = [vocoding(windows) for vocoding in vocodings]
        return tuple([wave.cpu() for wave in waves] for waves in (alone, *together))


def test_windows_of_all_lengths_at_once_are_what_each_is_alone(tiny: Path) -> None:
    """As they are, and filled up to lengths that a graph has."""
    for alone, *together in zip(*made(tiny, "cpu", captures=False, fills=(False, True)), strict=True):
        for wave in together:
            torch.testing.assert_close(wave, alone, atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_captured_passes_are_the_plain_ones(tiny: Path) -> None:
    for alone, together in zip(*made(tiny, "cuda", captures=True), strict=True):
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
