"""Many sounds and pictures at once come to what transformers' own towers make of each."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration

from training.checkpoint import toy_config
from training.recordings import Hearing, Recordings, drawn_hearing, tokens_of
from training.towers import hear, see

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def thinker() -> Qwen2_5OmniThinkerForConditionalGeneration:
    torch.manual_seed(0)
    return Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config).eval()


@cache
def recorded() -> tuple[np.ndarray, np.ndarray]:
    lengths = [7_000, 31_999, 32_000, 50_001]
    samples = np.random.RandomState(0).randint(-9_000, 9_000, sum(lengths)).astype(np.int16)
    return samples, np.cumsum([0, *lengths])


@torch.inference_mode()
def test_sounds_are_heard_as_one_by_one(toy_folder, thinker):
    samples, begins = recorded()
    rng = Random(1)
    hearings = [drawn_hearing(piece, int(begins[piece + 1] - begins[piece]), rng) for piece in (0, 1, 2, 3, 1)]
    recordings = Recordings(samples, begins, CPU)
    waves = recordings.waves(hearings, seed=5)
    features, frames = recordings.heard(hearings, seed=5)
    rows = hear(thinker.audio_tower, features, frames)
    extract = Qwen2_5OmniProcessor.from_pretrained(toy_folder).feature_extractor
    for each, wave, of_each in zip(hearings, waves, rows, strict=True):
        wave = wave[: each.samples].numpy()
        own = extract(
            wave, sampling_rate=16_000, max_length=len(wave) + 200, return_tensors="pt", return_attention_mask=True
        )
        alone = thinker.get_audio_features(own["input_features"], own["attention_mask"]).last_hidden_state
        assert len(alone) == each.tokens
        torch.testing.assert_close(of_each[: each.tokens], alone, atol=2e-5, rtol=1e-4)


def test_a_hearing_that_changes_nothing_is_the_recording():
    samples, begins = recorded()
    [wave] = Recordings(samples, begins, CPU).waves([Hearing(1, 31_999)], seed=0)
    np.testing.assert_array_equal(wave[:31_999].numpy(), samples[7_000:38_999].astype(np.float32) / 32_768)
    assert not wave[31_999:].any()


def test_noise_is_as_loud_as_it_is_said_to_be():
    samples, begins = recorded()
    recordings = Recordings(samples, begins, CPU)
    clean, noisy = recordings.waves([Hearing(3, 50_001), Hearing(3, 50_001, noise=0.1)], seed=0)[:, :50_001]
    ratio = 20 * torch.log10((noisy - clean).std() / clean.std())
    assert abs(float(ratio) + 20) < 0.2


def test_a_faster_hearing_is_shorter():
    rng = Random(0)
    lengths = {each.speed: each.samples for each in (drawn_hearing(0, 16_000, rng) for _ in range(50))}
    assert {speed < 1 for speed in lengths} == {True, False}
    for speed, samples in lengths.items():
        assert 0 <= samples - int(16_000 / speed) <= 1.4 * 16_000


@torch.inference_mode()
def test_pictures_are_seen_as_one_by_one(toy_folder, thinker):
    process = Qwen2_5OmniProcessor.from_pretrained(toy_folder).image_processor
    process.size = {"shortest_edge": 112 * 168, "longest_edge": 112 * 168}
    pictures = np.random.RandomState(0).randint(0, 256, (3, 112, 168, 3)).astype(np.uint8)
    rows = see(thinker.visual, torch.from_numpy(pictures))
    for picture, of_picture in zip(pictures, rows, strict=True):
        own = process(images=[Image.fromarray(picture)], return_tensors="pt")
        assert own["image_grid_thw"].tolist() == [[1, 8, 12]]
        [alone] = thinker.get_image_features(own["pixel_values"], own["image_grid_thw"]).pooler_output
        torch.testing.assert_close(of_picture, alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("samples", "tokens"), [(160, 0), (480, 1), (16_000, 25), (31_999, 50), (32_001, 50)])
def test_tokens_of_a_sound(samples, tokens):
    assert tokens_of(samples) == tokens
