"""The features of sounds as vLLM gets them, beside those of transformers' own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor

from omni_cluster.engine.build import bind
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from tests.engine.stages import pipeline_config

RATE_HZ = 16_000


@pytest.fixture(scope="module")
def processor() -> BaseMultiModalProcessor[Any]:
    bound = bind(pipeline_config())
    thinker = bound.config.stages[0]
    traits = bound.family.traits(thinker.model_stage)
    args = OmniEngineArgs.for_ar_stage(thinker, bound.config, str(bound.folder), traits)
    return MULTIMODAL_REGISTRY.create_processor(args.create_engine_config().model_config)


@pytest.fixture(scope="module")
def feature_extractor(tiny: Path) -> Any:
    from transformers import AutoFeatureExtractor

    return AutoFeatureExtractor.from_pretrained(tiny)


def sound(samples: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


def heard(processor: Any, sounds: list[np.ndarray]) -> list[torch.Tensor]:
    """Mel features `[bins, frames]` of each sound, as they go to the engine."""
    items = processor.info.parse_mm_data({"audio": [(each, RATE_HZ) for each in sounds]})
    made = processor._apply_hf_processor_main(items, {})
    return list(made["input_audio_features"].split(made["audio_feature_lengths"].tolist(), dim=1))


def reference(feature_extractor: Any, samples: np.ndarray) -> torch.Tensor:
    """Padded to 300 s, as transformers' processor does; it would cut a longer one, which is padded to 320 s here."""
    made = feature_extractor(
        samples,
        sampling_rate=RATE_HZ,
        padding="max_length",
        max_length=RATE_HZ * (300 if len(samples) < RATE_HZ * 299 else 320),
        return_attention_mask=True,
        return_tensors="pt",
    )
    return made["input_features"][0][:, made["attention_mask"][0].bool()]


@pytest.mark.parametrize(
    "lengths",
    [
        [RATE_HZ * 2],
        [RATE_HZ * 10 + 1],
        [RATE_HZ + 159, 401],
        [RATE_HZ * 3, RATE_HZ * 7 + 78],
        [0, RATE_HZ],  # silence: zeros are as far as its padding
        [RATE_HZ * 310, RATE_HZ],  # one is longer than what the processor pads to
    ],
)
def test_features_are_transformers_to_the_bit(processor: Any, feature_extractor: Any, lengths: list[int]) -> None:
    sounds = [sound(n, seed) if n else np.zeros(RATE_HZ, np.float32) for seed, n in enumerate(lengths)]
    for made, samples in zip(heard(processor, sounds), sounds, strict=True):
        assert torch.equal(made, reference(feature_extractor, samples))


def test_a_sound_is_padded_by_half_a_window_and_no_more(processor: Any) -> None:
    items = processor.info.parse_mm_data({"audio": [(sound(RATE_HZ), RATE_HZ), (sound(5), RATE_HZ)]})
    half_a_window = processor.info.get_feature_extractor().n_fft // 2
    assert processor.info.audio_padding(items) == {"audio_kwargs": {"max_length": RATE_HZ + half_a_window}}


def test_one_processor_serves_sounds_of_all_lengths(processor: Any) -> None:
    """vLLM would load another one for each set of options."""
    info = processor.info
    assert info.get_hf_processor(audio_kwargs={"max_length": 5}) is info.get_hf_processor()
