"""The toy family by `OmniLLM` and the HTTP face: what holds of every family, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import stages
from toy.family import Toy

from omni_cluster.engine.omni_llm import OmniLLM
from omni_cluster.models.registry import family_class, known_families
from tests.server.local import LocalApp, local_app

CONFIG = Path(__file__).parent / "toy" / "toy.yaml"
SAID = "Good morning"


@pytest.fixture(scope="module")
def toy() -> Iterator[OmniLLM]:
    omni = OmniLLM(CONFIG)
    try:
        yield omni
    finally:
        omni.shutdown()


@pytest.fixture(scope="module")
def toy_app(toy: OmniLLM) -> Iterator[LocalApp]:
    with local_app(toy) as app:
        yield app


def test_a_package_registers_its_family_by_an_entry_point() -> None:
    assert "toy" in known_families() and family_class("toy") is Toy


def test_it_says_what_it_was_told_in_text_and_sound(toy: OmniLLM) -> None:
    (made,) = toy.generate([SAID])
    assert (made.text, made.finish_reason) == (SAID, "stop")
    assert made.audio is not None and made.audio.sample_rate_hz == stages.RATE_HZ
    assert len(made.audio.samples) == len(SAID) * stages.SAMPLES_PER_CODE
    assert made.codec_tokens == stages.CODEBOOKS * len(SAID) + 1


def test_text_alone_needs_one_stage(toy: OmniLLM) -> None:
    (made,) = toy.generate([SAID], modalities=["text"])
    assert made.text == SAID and made.audio is None and list(made.stage_token_ids) == ["text"]
