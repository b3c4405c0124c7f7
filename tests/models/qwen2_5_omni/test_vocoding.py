from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.models.precision import products_in
from omni_cluster.models.qwen2_5_omni.bigvgan import Vocoder
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.models.qwen2_5_omni.vocoding import MAX_PASS_FRAMES, Vocoding, groups

LENGTHS = (72, 40, 1, 96, 500, 73, 72, 700)


@given(st.lists(st.integers(1, 9000), max_size=60))
def test_every_window_is_in_one_pass_of_bounded_size(lengths: list[int]) -> None:
    made = groups(lengths)
    assert sorted(place for group in made for place in group) == list(range(len(lengths)))
    for group in made:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= MAX_PASS_FRAMES


def test_windows_of_like_lengths_share_a_pass() -> None:
    assert groups([72, 80, 60, 500, 96, 511]) == [[0, 2], [1, 4], [3, 5]]


def made(folder: Path, device: str, captures: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The windows' waveforms together, and each alone in a pass of its own."""
    place = torch.device(device)
    with torch.inference_mode(), products_in("float32"):
        vocoder = Vocoder(load_token2wav(folder, place).code2wav_bigvgan_model, place, torch.float32)
        vocoding = Vocoding(vocoder, 80, place, captures)
        generator = torch.Generator().manual_seed(3)
        windows = [torch.randn(length, 80, generator=generator).to(place) for length in LENGTHS]
        alone = [vocoder(w[None], torch.tensor([len(w)], dtype=torch.int32, device=place))[0] for w in windows]
        together = vocoding(windows)
        return [wave.cpu() for wave in together], [wave.cpu() for wave in alone]


def test_windows_of_all_lengths_at_once_are_what_each_is_alone(tiny: Path) -> None:
    for wave, wanted in zip(*made(tiny, "cpu", captures=False), strict=True):
        torch.testing.assert_close(wave, wanted, atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_captured_passes_are_the_plain_ones(tiny: Path) -> None:
    for wave, wanted in zip(*made(tiny, "cuda", captures=True), strict=True):
        torch.testing.assert_close(wave, wanted, atol=1e-4, rtol=0)
