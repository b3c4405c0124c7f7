"""What vLLM gets of a prompt with media, beside what transformers' own processor makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3OmniMoeProcessor
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from omni_cluster.models import pixels
from omni_cluster.models.chat_files import ChatTemplate
from omni_cluster.models.qwen3_omni.fine_positions import unpacked
from omni_cluster.models.qwen3_omni.thinker_model import Qwen3OmniThinker
from omni_cluster.models.qwen3_omni.thinker_processor import sound_tokens
from omni_cluster.models.qwen3_omni.thinker_stage import Thinker
from omni_cluster.models.thinker_session import multi_modal_data, video_item
from omni_cluster.models.thinkers.heard_video_items import largest_video
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import Media, Video
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from tests.models.qwen3_omni.thinker_engine import OfFolder, pipeline_config
from tests.models.qwen3_omni.thinker_reference import SEEN_KINDS, ThinkerReference, media_of, prompt_text
from tests.reference import KINDS, synthetic_audio, synthetic_video

RATE_HZ = 16_000


@pytest.fixture(scope="module")
def processor(qwen3_folder: Path) -> Any:
    config = pipeline_config(qwen3_folder, limit_mm_per_prompt={"audio": 3, "image": 3, "video": 3})
    args = OmniEngineArgs.for_ar_stage(config.stages[0], config, str(qwen3_folder), Thinker(OfFolder(qwen3_folder)))
    return MULTIMODAL_REGISTRY.create_processor(args.create_engine_config().model_config)


@pytest.fixture(scope="module")
def stock(qwen3_folder: Path) -> Any:
    """transformers' processor."""
    return Qwen3OmniMoeProcessor.from_pretrained(qwen3_folder)


@pytest.fixture(scope="module")
def reference(qwen3_folder: Path, qwen3_reference: Any) -> ThinkerReference:
    return ThinkerReference(qwen3_folder, qwen3_reference)


def prepared(processor: Any, text: str, given: Media) -> dict[str, Any]:
    """What the engine is given."""
    ids = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    items = processor.info.parse_mm_data(multi_modal_data(given))
    made: dict[str, Any] = processor.apply(ProcessorInputs(prompt=ids, mm_data_items=items), TimingContext())
    return made


def features_of(made: dict[str, Any]) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(data, kind, f"{kind}-{number}", place)
        for kind, places in made["mm_placeholders"].items()
        for number, (data, place) in enumerate(zip(made["mm_kwargs"][kind], places, strict=True))
    ]


@pytest.mark.parametrize("kind", [*KINDS, *SEEN_KINDS])
def test_ids_and_positions_of_prompts_are_those_of_transformers(
    processor: Any, reference: ThinkerReference, qwen3_reference: Any, kind: str
) -> None:
    given = media_of(kind)
    inputs = reference.inputs(prompt_text(kind), given)
    made = prepared(processor, prompt_text(kind), given)
    assert made["prompt_token_ids"] == inputs["input_ids"][0].tolist()
    thinker = SimpleNamespace(config=qwen3_reference.config.thinker_config)
    positions, distance = Qwen3OmniThinker.get_mrope_input_positions(
        thinker,
        made["prompt_token_ids"],
        features_of(made),  # type: ignore[arg-type]
    )
    wanted = reference.positions(inputs, given)
    assert np.array_equal(unpacked(positions).numpy(), wanted)
    behind = unpacked(torch.tensor([int(distance) + len(made["prompt_token_ids"])]))
    assert float(behind) == wanted[0, -1] + 1


def test_a_prompt_of_all_media_has_the_ids_of_the_whole_processor(processor: Any, stock: Any) -> None:
    """Nothing of it replaced: videos of its own rate, of which there is one, and sounds of whole mel frames."""
    text = prompt_text("audio+heard+image")
    video = synthetic_video(4, fps=1.0, audio_s=3.0)
    given = Media((synthetic_audio(2.5),), media_of("image").images, (video,))
    inputs = stock(
        text=text, audio=[given.audios[0], video.audio], images=list(given.images), videos=[video.frames],
        use_audio_in_video=True, fps=1.0, return_tensors="pt",
    )  # fmt: skip
    assert prepared(processor, text, given)["prompt_token_ids"] == inputs["input_ids"][0].tolist()


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "You listen."}]},
    {
        "role": "user",
        "content": [
            {"type": "audio", "audio": "a"},
            {"type": "text", "text": "and"},
            {"type": "image", "image": "i"},
            {"type": "video", "video": "v"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]


def test_a_conversation_is_rendered_as_transformers_does(stock: Any, qwen3_folder: Path) -> None:
    made = ChatTemplate(qwen3_folder).render(MESSAGES)
    assert made == stock.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert made.count("<|audio_pad|>") == made.count("<|image_pad|>") == made.count("<|video_pad|>") == 1


def sound(samples: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


@pytest.mark.parametrize("lengths", [[RATE_HZ * 2], [RATE_HZ + 159, 401, 201], [RATE_HZ * 40 + 1, 3 * RATE_HZ]])
def test_features_are_transformers_of_each_sound_alone_to_the_bit(
    processor: Any, stock: Any, lengths: list[int]
) -> None:
    sounds = [sound(length, seed) for seed, length in enumerate(lengths)]
    items = processor.info.parse_mm_data({"audio": [(each, RATE_HZ) for each in sounds]})
    made = processor._apply_hf_processor_main(items, {})
    parts = made["input_audio_features"].split(made["audio_feature_lengths"].tolist(), dim=1)
    for part, samples in zip(parts, sounds, strict=True):
        wanted = stock(text=stock.audio_token, audio=[samples], return_tensors="pt")
        assert torch.equal(part, wanted["input_features"][0][:, wanted["feature_attention_mask"][0].bool()])
        assert sound_tokens(part.shape[1]) == int((wanted["input_ids"] == stock.tokenizer.audio_token_id).sum())


@pytest.mark.parametrize("samples", [0, 159, 200])
def test_a_sound_without_a_frame_is_refused(processor: Any, samples: int) -> None:
    items = processor.info.parse_mm_data({"audio": [(sound(samples), RATE_HZ)]}, validate=False)
    with pytest.raises(RequestError, match=f"a sound has {samples} samples; send at least 1600, 0.1 s of it"):
        processor._apply_hf_processor_main(items, {})


def test_sound_of_more_energy_than_float32_holds_is_refused(processor: Any) -> None:
    items = processor.info.parse_mm_data({"audio": [(np.full(RATE_HZ, 1e30, np.float32), RATE_HZ)]})
    with pytest.raises(RequestError, match="more energy than can be computed with"):
        processor._apply_hf_processor_main(items, {})


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("sizes", [[(28, 28)], [(640, 333)], [(57, 199), (300, 300)], [(31, 2000)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_of_images_are_transformers_to_the_bit(
    processor: Any, stock: Any, sizes: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.info.ctx.model_config, "dtype", dtype)
    pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]
    made = processor._apply_hf_processor_main(processor.info.parse_mm_data({"image": pictures}), {})
    wanted = stock(text=stock.image_token * len(pictures), images=pictures, return_tensors="pt")
    assert torch.equal(made["pixel_values"], wanted["pixel_values"].to(dtype))
    assert torch.equal(made["image_grid_thw"], wanted["image_grid_thw"])


@pytest.mark.parametrize("sizes", [[(4, 56, 84)], [(7, 320, 180)], [(16, 100, 60), (9, 64, 64)], [(2, 1200, 900)]])
def test_pixels_of_videos_are_transformers_to_the_bit(
    processor: Any, stock: Any, sizes: list[tuple[int, int, int]]
) -> None:
    films = [np.random.default_rng(n).integers(0, 256, (n, height, width, 3), np.uint8) for n, width, height in sizes]
    items = processor.info.parse_mm_data({"video": [video_item(each, 2.0, None) for each in films]})
    made = processor._apply_hf_processor_main(items, {})
    wanted = stock(text=stock.video_token * len(films), videos=films, return_tensors="pt")
    assert torch.equal(made["pixel_values_videos"], wanted["pixel_values_videos"])
    assert torch.equal(made["video_grid_thw"], wanted["video_grid_thw"])


def test_one_processor_serves_all_calls(processor: Any) -> None:
    """vLLM would load another one for each set of options."""
    info = processor.info
    for_a_call = pixels.options_of(info.get_hf_processor(), [], {})
    assert for_a_call and info.get_hf_processor(truncation=False, **for_a_call) is info.get_hf_processor()


def test_the_largest_video_fills_what_vllm_tries_the_encoders_with(processor: Any, stock: Any) -> None:
    """Its frames are as large as the processor lets any be."""
    frames = largest_video(1600, 32)
    made = stock(text=stock.video_token, videos=[frames], return_tensors="pt")
    assert int((made["input_ids"] == stock.tokenizer.video_token_id).sum()) == 2 * 24 * 32
    counts = {"audio": 1, "image": 1, "video": 1}
    most = processor.info.get_mm_max_tokens_per_item(1600, counts)
    assert most == {"audio": 390, "image": 64, "video": 1600}
    data = processor.dummy_inputs.get_dummy_mm_data(1600, counts, {})
    assert data["video"][0][0].shape == frames.shape
    mel = processor._apply_hf_processor_main(processor.info.parse_mm_data({"audio": data["audio"]}), {})
    assert sound_tokens(int(mel["audio_feature_lengths"])) == 390


def test_sound_of_a_video_is_part_of_its_item(processor: Any) -> None:
    video = Video(synthetic_video(4, fps=1.5).frames, 1.5, synthetic_audio(2.0))
    made = prepared(processor, prompt_text("heard"), Media(videos=(video,)))
    (place,) = made["mm_placeholders"]["video"]
    assert made["mm_placeholders"].keys() == {"video"}
    assert place.is_embed.sum() == place.length - 2  # the marks of sound
