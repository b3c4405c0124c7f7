"""The toy's files, and its bounds."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2Tokenizer

from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.types.errors import ConfigError
from training.checkpoint import TEXT_VOCABULARY, TOKENS, build_tokenizer, join_parts, toy_config, write_toy
from training.turns import typed
from training.words import LETTERS
from training.world import Split, items, vocabulary


@pytest.fixture(scope="module")
def tokenizer(toy_folder):
    return Qwen2Tokenizer.from_pretrained(toy_folder)


def test_thinker_and_talker_leave_a_quarter_of_ten_million_parameters_to_code2wav():
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(toy_config())
    parts = [sum(each.numel() for each in part.parameters()) for part in (model.thinker, model.talker)]
    assert parts[0] < 5_100_000
    assert sum(parts) < 7_500_000


def test_a_word_is_few_tokens_and_a_letter_is_one(tokenizer):
    lengths = [len(tokenizer.encode(f" {word}")) for word in vocabulary()]
    assert max(lengths) <= 6
    assert sum(lengths) < 1.6 * len(lengths)
    assert {len(tokenizer.encode(f" {letter}")) for letter in LETTERS} == {1}


def test_the_tokenizer_is_the_same_again(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_what_people_type_is_read_and_every_id_is_in_the_vocabulary(tokenizer):
    from random import Random

    for number in range(50):
        text = typed(next(items(Split.TRAIN, number)).question, Random(number))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.get_vocab().values()) < TOKENS.tts_text_pad < TEXT_VOCABULARY


def test_transformers_has_nothing_to_say_of_its_ids(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = toy_config()
    for of_talker in ("tts_text_end_token_id", "audio_end_token_id", "tts_codec_mask_token_id"):
        assert getattr(config.talker_config, of_talker) < config.talker_config.vocab_size


def test_a_checkpoint_is_joined_of_its_parts(tmp_path):
    write_toy(tmp_path / "parts")
    for name in ("thinker", "talker", "token2wav"):
        save_file({f"{name}.weight": torch.ones(2)}, tmp_path / "parts" / f"{name}.safetensors")
    voice = {"bos_token": TOKENS.chelsie, "cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 4, 80)}
    torch.save({"Chelsie": voice}, tmp_path / "parts" / "spk_dict.pt")
    join_parts(tmp_path / "parts", tmp_path / "toy")
    assert load_file(tmp_path / "toy" / "model.safetensors").keys() == {
        "thinker.weight", "talker.weight", "token2wav.weight",
    }  # fmt: skip
    assert Qwen2_5Omni(tmp_path / "toy").voices == ("Chelsie",)


def test_a_part_that_is_missing_is_named(tmp_path):
    write_toy(tmp_path / "parts")
    with pytest.raises(ConfigError, match=r"has no thinker\.safetensors: train the thinker first"):
        join_parts(tmp_path / "parts", tmp_path / "toy")
    assert not (tmp_path / "toy").exists()
