"""Passes of captured sizes: filled up, in memory that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.models.precision import products_in
from omni_cluster.models.qwen3_omni import vocoder_pass
from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES
from omni_cluster.models.qwen3_omni.code2wav_model import load_model
from omni_cluster.models.qwen3_omni.options import Code2WavOptions
from omni_cluster.models.qwen3_omni.vocoder import Vocoder, load_vocoder
from omni_cluster.models.qwen3_omni.vocoder_pass import PassTensors

PIECES = [[1, 2, 4, 8, PASS_CODES], [3, 3, 30, 0, 9], [5, 40, 1, 1, 1], *[[4, 4, 4, 4, 4]] * 34]
"""Codes of the pieces of each stream: as many of one length as no pass holds."""


class Replayed:
    """What a graph does, on a device that has none: the same work on the same tensors."""

    def __init__(self, inputs: PassTensors, work: Callable[[], None], pool: object) -> None:
        self.inputs, self.replay = inputs, work


def codes_of(count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (count, 4)).astype(np.int16)


def streamed(vocoder: Vocoder) -> list[torch.Tensor]:
    """The streams of `PIECES`, a piece of each at a time."""
    codes = [np.split(codes_of(sum(sizes), seed), np.cumsum(sizes)[:-1]) for seed, sizes in enumerate(PIECES)]
    streams, waves = [vocoder.stream() for _ in PIECES], []
    for turn in range(len(PIECES[0])):
        waves.append(vocoder.take(streams, [each[turn] for each in codes]))
    return [torch.cat(of_stream) for of_stream in zip(*waves, strict=True)]


def test_what_fills_a_pass_up_and_what_was_in_its_memory_changes_no_sound(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocoder_pass, "CapturedWork", Replayed)
    monkeypatch.setattr(vocoder_pass, "GraphPool", object)
    plain, captured = (load_vocoder(qwen3_folder, torch.device("cpu"), torch.float64, each) for each in (False, True))
    for _ in range(2):
        for made, wanted in zip(streamed(captured), streamed(plain), strict=True):
            assert len(made) == len(wanted) and float((made - wanted).abs().max()) < 1e-7


def test_every_pass_of_a_stream_is_of_a_captured_size(qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of another size has kernels to choose, and all streams would stand still meanwhile."""
    monkeypatch.setattr(vocoder_pass, "CapturedWork", Replayed)
    monkeypatch.setattr(vocoder_pass, "GraphPool", object)
    vocoder = load_vocoder(qwen3_folder, torch.device("cpu"), torch.float32, True)

    def not_captured(*_: Any) -> PassTensors:
        raise AssertionError("a pass of a size that was not captured")

    monkeypatch.setattr(vocoder._work, "tensors", not_captured)
    streamed(vocoder)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "least_db"), [("float32", 80.0), ("tfloat32", 35.0), ("bfloat16", 20.0)])
def test_graphs_on_cuda_are_near_the_plain_passes_of_a_cpu(qwen3_folder: Path, dtype: Any, least_db: float) -> None:
    options = Code2WavOptions(dtype=dtype)
    model = load_model(qwen3_folder, torch.device("cuda"), options)
    wanted = streamed(load_vocoder(qwen3_folder, torch.device("cpu"), torch.float32))
    with products_in(dtype):
        made = streamed(model._vocoder)
    for one, other in zip(made, wanted, strict=True):
        noise = (one.cpu() - other).square().mean()
        assert float(10 * torch.log10(other.square().mean() / noise)) > least_db
