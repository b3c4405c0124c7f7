"""The trained toy that the package has, as a user meets it: `preset:toy` with its shipped configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5OmniForConditionalGeneration

from omni_cluster.config.loader import load_config
from omni_cluster.engine.omni_llm import OmniLLM
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.registry import known_families
from training.checkpoint import toy_config
from training.recogniser import Recogniser

MOST_BYTES = 20_000_000
PAGE_SOUNDS = Path(__file__).parents[2] / "docs" / "sound"
ANSWERS = {
    "What is three plus four?": "three plus four is seven",
    "Say the dog sleeps.": "the dog sleeps",
    "what day comes after monday": "tuesday comes after monday",
    "What is the capital of France?": "i am only a toy and do not know that",
}
"""Of training's own questions: what fails here is no matter of luck."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return Qwen2_5Omni.embedded_checkpoint("toy")


@pytest.fixture(scope="module")
def spoken() -> dict[str, Any]:
    """Answers in text and in both voices, by question and voice."""
    config = load_config("stage_configs/qwen2_5_omni_toy.yaml", known_families=known_families())
    asked = [(question, voice) for question in ANSWERS for voice in ("Chelsie", "Ethan")]
    with OmniLLM(config) as omni:
        prompts = [omni.render([{"role": "user", "content": question}]) for question, _ in asked]
        outputs = omni.generate(prompts, voice=[voice for _, voice in asked], use_tqdm=False)
    return dict(zip(asked, outputs, strict=True))


def test_it_has_the_weights_of_the_sizes_that_are_trained(folder: Path) -> None:
    with torch.device("meta"):
        wanted = Qwen2_5OmniForConditionalGeneration(toy_config()).state_dict()
    weights = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    assert {name: each.shape for name, each in weights.items()} == {name: each.shape for name, each in wanted.items()}
    assert {each.dtype for each in weights.values()} == {torch.float16}


def test_it_is_small(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES


def test_the_sounds_of_its_page_say_the_pages_words() -> None:
    recogniser = Recogniser()
    said = {file.stem: recogniser.text(*decoded(file)) for file in PAGE_SOUNDS.iterdir()}
    assert said == dict.fromkeys(("chelsie", "ethan"), "the brave doctor sings")


def decoded(file: Path) -> tuple[np.ndarray, int]:
    with av.open(str(file)) as opened:
        frames = [frame.to_ndarray() for frame in opened.decode(audio=0)]
        return np.concatenate(frames, axis=1)[0].astype(np.float32), opened.streams.audio[0].rate


@pytest.mark.full
def test_it_answers_in_words(spoken: dict[str, Any]) -> None:
    said = {question: output.text for (question, _), output in spoken.items()}
    assert said == ANSWERS


@pytest.mark.full
def test_its_answers_can_be_understood(spoken: dict[str, Any]) -> None:
    recogniser = Recogniser()
    heard = {
        asked: recogniser.text(np.asarray(output.audio.samples, np.float32), output.audio.sample_rate_hz)
        for asked, output in spoken.items()
    }
    right = [asked for asked, text in heard.items() if text == ANSWERS[asked[0]]]
    assert len(right) >= len(heard) - 1, heard
