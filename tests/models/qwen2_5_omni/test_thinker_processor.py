"""Features of sounds and pixels of images and videos as vLLM gets them, beside transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor

from omni_cluster.engine.build import bind
from omni_cluster.models import pixels
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.models.thinker_session import video_item
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from tests.engine.stages import pipeline_config

RATE_HZ = 16_000


@pytest.fixture(scope="module")
def processor() -> BaseMultiModalProcessor[Any]:
    bound = bind(pipeline_config())
    thinker = bound.config.stages[0]
    spec = cast(ARSpec, bound.spec(thinker))
    args = OmniEngineArgs.for_ar_stage(thinker, bound.config, str(bound.folder), spec)
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


def test_one_processor_serves_all_calls(processor: Any) -> None:
    """vLLM would load another one for each set of options."""
    info = processor.info
    for_a_call = pixels.options_of(info.get_hf_processor(), [], {})
    assert info.get_hf_processor(audio_kwargs={"max_length": 5}, **for_a_call) is info.get_hf_processor()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def film(frames: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), np.uint8)


PICTURES = [[(28, 28)], [(640, 333)], [(57, 199), (300, 300), (57, 199)], [(31, 2000), (28, 30)]]
FILMS = [[(4, 56, 84)], [(7, 320, 180)], [(16, 100, 60), (9, 64, 64)]]


@pytest.mark.parametrize("sizes", PICTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_of_images_are_transformers_to_the_bit(
    processor: Any, sizes: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.info.ctx.model_config, "dtype", dtype)
    monkeypatch.setattr(pixels, "_PART_VALUES", 3 * 1176 + 1)  # some patches at a time, and a rest
    pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]
    made = processor._apply_hf_processor_main(processor.info.parse_mm_data({"image": pictures}, validate=False), {})
    wanted = processor.info.get_hf_processor().image_processor(images=pictures, return_tensors="pt")
    assert wanted["pixel_values"].dtype == torch.float32 and len(wanted["pixel_values"]) % 3
    assert torch.equal(made["pixel_values"], wanted["pixel_values"].to(dtype))
    assert torch.equal(made["image_grid_thw"], wanted["image_grid_thw"])


@pytest.mark.parametrize("sizes", FILMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_of_videos_are_transformers_to_the_bit(
    processor: Any, sizes: list[tuple[int, int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.info.ctx.model_config, "dtype", dtype)
    films = [film(*size) for size in sizes]
    items = processor.info.parse_mm_data({"video": [video_item(each, 2.0, None) for each in films]})
    made = processor._apply_hf_processor_main(items, {})
    whole = processor.info.get_hf_processor()
    wanted = whole(text=whole.video_token * len(films), videos=films, return_tensors="pt")
    assert torch.equal(made["pixel_values_videos"], wanted["pixel_values_videos"].to(dtype))
    assert torch.equal(made["video_grid_thw"], wanted["video_grid_thw"])


def test_frames_that_are_no_bytes_are_left_to_the_processor(processor: Any) -> None:
    frames = film(4, 56, 84).astype(np.float32)
    items = processor.info.parse_mm_data({"video": [video_item(frames, 2.0, None)]})
    whole = processor.info.get_hf_processor()
    wanted = whole(text=whole.video_token, videos=[frames], return_tensors="pt")["pixel_values_videos"]
    assert torch.equal(processor._apply_hf_processor_main(items, {})["pixel_values_videos"], wanted)


def test_options_of_values_are_left_to_the_processor(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, items = processor.info.get_hf_processor(), processor.info.parse_mm_data({"image": [picture(60, 60)]})
    assert pixels.options_of(whole, [picture(60, 60)], {"max_pixels": 3136}).keys() == set(pixels.OPTIONS)
    for given in ({"do_normalize": False}, {"images_kwargs": {"image_mean": (0.0, 0.0, 0.0)}}, {"rescale_factor": 1.0}):
        assert pixels.options_of(whole, [], given) == {}
    as_bytes = processor._apply_hf_processor_main(items, {"do_rescale": False, "do_normalize": False})["pixel_values"]
    assert as_bytes.dtype == torch.uint8
    as_configured = processor._apply_hf_processor_main(items, {"do_normalize": False})["pixel_values"]
    assert float(as_configured.min()) >= 0 and float(as_configured.max()) == 1.0  # rescaled alone
    for name, value in {"image_mean": 0.5, "image_std": 0.5, "do_rescale": False, "do_normalize": False}.items():
        with monkeypatch.context() as patched:
            patched.setattr(whole.image_processor, name, value)
            assert pixels.options_of(whole, [], {}) == {}
