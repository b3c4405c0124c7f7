"""The toy's files, and its bounds."""

from __future__ import annotations

import warnings

import pytest
import torch
from PIL import Image
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor, Qwen2Tokenizer

from training.checkpoint import TEXT_VOCABULARY, TOKENS, build_tokenizer, toy_config
from training.typed import typed
from training.words import LETTERS
from training.world import Split, items, vocabulary


@pytest.fixture(scope="module")
def tokenizer(toy_folder):
    return Qwen2Tokenizer.from_pretrained(toy_folder)


def test_it_has_less_than_ten_million_parameters():
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(toy_config())
    parts = [sum(each.numel() for each in part.parameters()) for part in (model.thinker, model.talker, model.token2wav)]
    assert parts[0] < 5_100_000
    assert sum(parts[:2]) < 7_500_000
    assert sum(parts) < 9_600_000


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


def test_square_pictures_of_all_sizes_are_read_at_the_one_that_is_trained_on(toy_folder):
    process = Qwen2_5OmniProcessor.from_pretrained(toy_folder).image_processor
    pictures = [Image.new("RGB", (side, side)) for side in range(28, 700, 7)]
    grids = process(images=pictures, return_tensors="pt")["image_grid_thw"]
    assert {tuple(grid) for grid in grids.tolist()} == {(1, 8, 8)}
