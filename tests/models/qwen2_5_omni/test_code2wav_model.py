"""Code2wav against transformers' token2wav, one request at a time and many at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omni_cluster.models.family import DiffusionJob
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from tests.reference import Reference

SAMPLES_PER_CODE = 480


@pytest.fixture(scope="module")
def model(tiny: Path) -> Code2WavModel:
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"))


def job(count: int, voice: str = "Chelsie", seed: int = 0) -> DiffusionJob:
    codes = tuple(np.random.RandomState(count).randint(0, 8192, count).tolist())
    return DiffusionJob(codes, voice, seed, 2 * count)


def wanted(reference: Reference, asked: DiffusionJob) -> np.ndarray:
    return reference.waveform(asked.codes, asked.voice, asked.seed)


def assert_close(made: np.ndarray, expected: np.ndarray) -> None:
    assert made.dtype == np.float32 and made.shape == expected.shape
    np.testing.assert_allclose(made, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 11, 12, 13, 60])
def test_alone_is_the_reference_around_the_dits_block_size(
    model: Code2WavModel, reference: Reference, count: int
) -> None:
    (made,) = model.generate([job(count)])
    assert made.shape == (count * SAMPLES_PER_CODE,) and np.abs(made).max() > 0.01
    assert_close(made, wanted(reference, job(count)))


def test_batch_of_different_lengths_voices_and_seeds_is_the_reference(
    model: Code2WavModel, reference: Reference
) -> None:
    asked = [job(60, "Ethan", 1), job(50, "Chelsie", 2), job(60, "Chelsie", 3), job(49, "Ethan", 4), job(12)]
    for made, one in zip(model.generate(asked), asked, strict=True):
        assert_close(made, wanted(reference, one))


def test_equal_jobs_of_a_batch_are_equal(model: Code2WavModel) -> None:
    first, _, last = model.generate([job(20), job(24), job(20)])
    np.testing.assert_array_equal(first, last)


def test_seed_voice_and_codes_each_change_the_waveform(model: Code2WavModel) -> None:
    plain = job(20)
    (made,) = model.generate([plain])
    others = [
        DiffusionJob(plain.codes, plain.voice, 1, plain.frames),
        DiffusionJob(plain.codes, "Ethan", 0, plain.frames),
        DiffusionJob(plain.codes[::-1], plain.voice, 0, plain.frames),
    ]
    for other in model.generate(others):
        assert np.abs(other - made).max() > 1e-3


def test_last_code_of_the_embedding_can_be_spoken(model: Code2WavModel, reference: Reference) -> None:
    asked = DiffusionJob((8193, 0, 8192), "Chelsie", 0, 6)
    (made,) = model.generate([asked])
    assert_close(made, wanted(reference, asked))


def test_sound_stays_within_bounds_and_has_the_models_rate(model: Code2WavModel) -> None:
    (made,) = model.generate([job(60)])
    assert np.abs(made).max() <= 1 and model.sample_rate_hz == 24_000
