from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.stages import Speak
from tests.reference import KINDS, Reference, media, prompt_text

SOME_KINDS = ["text", "audio+image", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("audio", "image"))]


@pytest.fixture(scope="module")
def without_mask(tiny: Path) -> Reference:
    return Reference(tiny, restore_mask=False)


@pytest.mark.parametrize("kind", KINDS)
def test_thinker_shapes_and_margins(reference: Reference, kind: str) -> None:
    made = reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=24)
    prompt, reply = len(made.prompt_ids), len(made.token_ids)
    assert made.rows.shape == (prompt + reply - 1, 128)
    assert made.positions.shape == (3, prompt)
    assert len(set(made.token_ids)) > 4
    assert made.min_margin > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_speech_continues_the_thinkers_tokens_with_distinct_codes(
    reference: Reference, speak: Speak, kind: str
) -> None:
    made = speak(kind)
    assert made.token_ids == reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=16).token_ids
    assert made.talker_positions.shape == (3, len(made.prompt_ids) + 2)
    assert len(made.codes) == 60 and len(set(made.codes)) > 30
    assert max(made.codes) < 8192
    assert made.min_margin > 1e-3
    assert made.waveform.shape == (60 * 480,) and made.waveform.dtype == np.float32
    assert 0.01 < np.abs(made.waveform).max() < 1


def test_row_at_a_media_position_is_the_last_hidden_alone(reference: Reference) -> None:
    made = reference.thinker(prompt_text("audio"), *media("audio"), max_new_tokens=2)
    audio_id = reference.model.config.thinker_config.audio_token_index
    ids = torch.tensor(made.prompt_ids)
    inputs = reference._inputs(prompt_text("audio"), *media("audio"))
    with torch.inference_mode():
        last_hidden = reference.model.thinker(**inputs, output_hidden_states=True).hidden_states[-1][0]
        embeds = reference.model.thinker.get_input_embeddings()(ids)
    added = made.rows[: len(ids)] - last_hidden
    assert torch.equal(added[ids == audio_id].abs().max(), torch.tensor(0.0))
    torch.testing.assert_close(added[ids != audio_id], embeds[ids != audio_id], atol=1e-5, rtol=0)


def test_media_positions_are_not_linear(reference: Reference) -> None:
    image = reference.thinker(prompt_text("image"), *media("image"), max_new_tokens=1).positions
    text = reference.thinker(prompt_text("text"), max_new_tokens=1).positions
    assert torch.equal(text, torch.arange(text.shape[1]).expand(3, -1))
    assert not torch.equal(image[1], image[2])


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_dropped_mask_changes_the_codes(speak: Speak, without_mask: Reference, kind: str) -> None:
    assert without_mask.speech(prompt_text(kind), *media(kind)).codes != speak(kind).codes


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_voice_changes_the_codes(speak: Speak, kind: str) -> None:
    chelsie, ethan = speak(kind, "Chelsie"), speak(kind, "Ethan")
    assert chelsie.codes != ethan.codes and chelsie.token_ids == ethan.token_ids


def test_talker_positions_are_those_of_the_prompts_media(reference: Reference) -> None:
    made = reference.speech(prompt_text("image"), *media("image"), max_codes=2)
    thinker = reference.thinker(prompt_text("image"), *media("image"), max_new_tokens=1)
    assert torch.equal(made.talker_positions[:, : len(made.prompt_ids)], thinker.positions)
    assert torch.equal(made.talker_positions[0], made.talker_positions[0].sort().values)


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan"])
def test_waveform_is_that_of_the_codes_and_the_seed(reference: Reference, voice: str) -> None:
    made = reference.speech(prompt_text("text"), voice=voice, max_codes=24, seed=5)
    assert np.array_equal(made.waveform, reference.waveform(made.codes, voice, seed=5))
    assert not np.allclose(made.waveform, reference.waveform(made.codes, voice, seed=6), atol=1e-3)


def test_noise_is_one_draw_of_a_generator_with_the_seed(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = reference.speech(prompt_text("text"), max_codes=24).codes
    noise = torch.randn([1, 2 * len(codes), 80], generator=torch.Generator().manual_seed(11))
    seeded = reference.waveform(codes, seed=11)
    monkeypatch.setattr(torch, "randn", lambda size, **kwargs: noise.reshape(size))
    assert np.array_equal(seeded, reference.waveform(codes, seed=0))


def test_question_voice_and_codes_change_the_waveform(reference: Reference) -> None:
    one = reference.speech(prompt_text("text"), max_codes=24)
    other = reference.speech(prompt_text("text", question="Who are you?"), max_codes=24)
    assert one.token_ids != other.token_ids and one.codes != other.codes
    assert not np.allclose(reference.waveform(one.codes, "Ethan"), one.waveform, atol=1e-3)
    assert not np.allclose(reference.waveform(other.codes), one.waveform, atol=1e-3)
