"""The talker's training: what it reads is what transformers' whole model gives its talker, and it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from tests.training.sayings import seconds_are_steps
from training.batches import Batch, Reply
from training.checkpoint import CODEC_MARKS, toy_config
from training.durations import Durations
from training.generation import generate, mistakes
from training.pool import make_pool
from training.talker import WEIGHTS, Data, Learner, TalkerPlan, TalkerTrainer
from training.talker_batches import END, talker_batch
from training.texts import drawn_texts, plain
from training.thinker import WEIGHTS as THINKER_WEIGHTS
from training.thinker import Media
from training.world import Split, items

CPU = torch.device("cpu")


class Spoken(torch.nn.Module):
    """Takes code2wav's place, and keeps its codes."""

    dtype = torch.float32

    def forward(self, codes, **_):
        self.codes = codes[0].tolist()
        return torch.zeros(1)


@pytest.fixture(scope="module")
def whole():
    """The toy of random weights, whose codes differ from place to place."""
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(toy_config()).eval()
    for table in (model.thinker.model.embed_tokens, model.talker.model.embed_tokens):
        torch.nn.init.normal_(table.weight)
    for head in (model.thinker.lm_head, model.talker.codec_head):
        torch.nn.init.normal_(head.weight, std=0.3)
    model.token2wav = Spoken()
    model.speaker_map = {
        name: {"bos_token": token, "cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 4, 80)}
        for name, token in (("Chelsie", 1072), ("Ethan", 1073))
    }
    return model


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan"])
@torch.inference_mode()
def test_its_rows_codes_and_positions_are_those_of_transformers_whole_model(toy_folder, whole, voice):
    processor = Qwen2_5OmniProcessor.from_pretrained(toy_folder)
    picture = np.random.RandomState(0).randint(0, 256, (112, 112, 3)).astype(np.uint8)
    pool = replace(make_pool(Split.TRAIN, 0, 1, 0, 0), pictures=[picture])
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|>what is this"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = dict(processor(text=[text], images=[picture], return_tensors="pt"))
    with_mask(whole.talker)
    sequence, _ = whole.generate(
        **{"thinker_pixel_values" if name == "pixel_values" else name: each for name, each in inputs.items()},
        speaker=voice, generation_mode="audio", thinker_max_new_tokens=5, thinker_do_sample=False,
        talker_max_new_tokens=30, talker_do_sample=False, talker_repetition_penalty=1.0,
    )  # fmt: skip
    codes = whole.token2wav.codes
    assert len(set(codes)) > 3
    batch = batch_of(sequence, inputs, whole.thinker)
    learner = Learner(whole.thinker)
    learner.talker = whole.talker
    speech, media = talker_batch(batch, [codes], [voice], [codes]), Media(pool, CPU)
    logits = learner.logits(learner.hidden(learner.rows(batch, media, seed=0), speech)[0], speech)
    logits[:, CODEC_MARKS + 1] = -torch.inf  # the codec's start, which transformers suppresses
    assert logits.argmax(1)[: len(codes)].tolist() == codes
    (generated,) = generate(learner, batch, [voice], media, len(codes))
    assert [*generated.codes] == codes


def with_mask(talker):
    """transformers' `generate` drops a mask of ones, and the talker then leaves out its codes' embeddings."""
    from tests.reference import _with_mask

    talker.prepare_inputs_for_generation = _with_mask(talker.prepare_inputs_for_generation)


def batch_of(sequence, inputs, thinker):
    ids, begin = sequence.numpy(), inputs["input_ids"].shape[1]
    mask = torch.ones_like(sequence)
    positions, _ = thinker.get_rope_index(sequence, inputs["image_grid_thw"], None, mask)
    is_picture = np.flatnonzero(ids[0] == thinker.config.image_token_index)
    reply = Reply(begin, ids.shape[1] - 1, "")
    none = np.zeros(0, np.int64)
    return Batch(
        ids, positions.long().numpy(), none, none, none, ["picture"], [reply], shown={(4, 4): [0]},
        shown_to={(4, 4): is_picture},
    )  # fmt: skip


def letters(text):
    """Codes for want of a codebook: silence, two for each letter of a word, silence."""
    return [1, 1, 1, *(ord(letter) - 30 for word in text.split() for letter in word * 2), *[1] * 10]


@pytest.fixture
def plan(espeak, toy_copy, whole):
    weights = {f"thinker.{name}": each for name, each in whole.thinker.state_dict().items()}
    save_file(weights, toy_copy / THINKER_WEIGHTS)
    return TalkerPlan(
        out=toy_copy, thinker=toy_copy, codebook=toy_copy / "none", minutes=15 / 60, size=12, exam=8, generated=0,
        most_tokens=2_000,
    )  # fmt: skip


def trainer(plan):
    pool, exam = make_pool(Split.TRAIN, 8, 4, 0, 0), make_pool(Split.HELD_OUT, 8, 4, 0, 0)
    typed = [next(items(Split.TRAIN, seed)) for seed in range(20)]
    texts, exam_texts = drawn_texts(20, Split.TRAIN, 0), drawn_texts(8, Split.HELD_OUT, 0)
    answered = [*typed, *pool.spoken, *pool.shown, *exam.spoken, *exam.shown]
    said = chain((item.answer for item in answered), *texts.values(), *exam_texts.values())
    codes = {text: letters(text) for text in said}
    data = Data(
        pool=pool, typed=typed, texts=texts, exam=exam, exam_texts=exam_texts, codes=codes,
        durations=Durations.measured(codes),
    )  # fmt: skip
    return TalkerTrainer(plan, data)


def test_no_held_out_text_is_trained_on_or_measured(plan, codebook):
    small = replace(plan, codebook=codebook, items=5, texts=15, pieces=4, pictures=2, exam=15)
    data = Data.made(small)
    answered = [*data.typed, *data.pool.spoken, *data.pool.shown]
    assert {item.split for item in answered} == {Split.TRAIN}
    assert {item.split for item in (*data.exam.spoken, *data.exam.shown)} == {Split.HELD_OUT}
    trained = {*(item.answer for item in answered), *chain(*data.texts.values())}
    assert all(texts and not trained & {*texts} for texts in data.exam_texts.values())
    assert data.durations == Durations.measured({text: its for text, its in data.codes.items() if text in trained})
    assert data.durations != Durations.measured(data.codes)


def test_it_learns_what_is_said_and_leaves_the_thinker_as_it_is(plan, monkeypatch):
    with seconds_are_steps(monkeypatch):
        run = trainer(plan)
        before = {name: each.clone() for name, each in run.learner._thinker[0].state_dict().items()}
        untrained = loss_of(run)
        run.train()
    assert loss_of(run) < 0.85 * untrained
    for name, tensor in run.learner._thinker[0].state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)
    weights = load_file(plan.out / WEIGHTS)
    assert weights.keys() == {f"talker.{name}" for name in run.learner.talker.state_dict()}
    assert {each.dtype for each in weights.values()} == {torch.float16}


@torch.no_grad()
def loss_of(run):
    given = run._data[0]
    return float(sum(run.losses(each, 0)["loss"] for each in given)) / sum(run.counts(each)["loss"] for each in given)


def test_each_code_is_foretold_and_then_the_end(plan):
    run = trainer(plan)
    for batch, speech in run._data[3]:
        assert len(batch.replies) == len(speech.rows)
        for number, reply in enumerate(batch.replies):
            assert speech.targets[speech.owners == number].tolist() == [*letters(plain(reply.text)), END]


def test_each_code_of_a_word_points_to_its_tokens(plan, toy_folder):
    tokenizer = Qwen2_5OmniProcessor.from_pretrained(toy_folder).tokenizer
    run, pointed = trainer(plan), 0
    for batch, speech in run._data[1]:
        for number, reply in enumerate(batch.replies):
            spans = speech.tokens_of[speech.owners == number]
            ids = batch.ids[number, reply.begin : reply.end].tolist()
            words = [tokenizer.decode(ids[begin:end]).strip() for begin, end in spans]
            said = [word for word, before in zip(words, ["", *words], strict=False) if word and word != before]
            assert said == [word for word, _ in groupby(reply.text.split())]
            assert not any(words[:3]) and not any(words[-11:])
            assert (speech.arrivals[number] > 0).sum() == len(ids)
            pointed += len(said)
    assert pointed > 20


def test_some_of_what_it_is_fed_is_misheard_but_not_what_it_is_to_say():
    from training.talker_batches import _misheard

    codes = [*range(1_000)]
    fed = _misheard(codes, 0.05, Random(0))
    assert 20 < sum(one != other for one, other in zip(codes, fed, strict=True)) < 90


def test_a_talker_that_overfits_utters_the_whole_text_and_ends(plan, monkeypatch):
    with seconds_are_steps(monkeypatch):
        run = trainer(replace(plan, size=1, minutes=150 / 60))
        ((batch, speech),) = run._data[0]
        run.learner.train()
        for step in run.run.steps():
            run.learn([(batch, speech)], step)
    run._generated = [batch]
    shares = run.generated()
    assert shares["generated to the end"] == 1
    assert shares["wrong codes"] <= 0.05


def test_mistakes_are_what_is_changed_left_out_and_put_in():
    assert mistakes([1, 2, 3], [1, 2, 3]) == 0
    assert mistakes([], [1, 2]) == 2
    assert mistakes([1, 2], []) == 2
    assert mistakes([1, 9, 3, 4, 4], [1, 2, 3, 4]) == 2
    assert mistakes([7, 1, 2, 3], [1, 2, 3]) == 1


def test_it_begins_with_the_weights_of_an_earlier_training(whole, tmp_path):
    save_file({f"talker.{name}": each for name, each in whole.talker.state_dict().items()}, tmp_path / WEIGHTS)
    learner = Learner(whole.thinker)
    learner.begin_with(tmp_path)
    assert all(torch.equal(each, whole.talker.state_dict()[name]) for name, each in learner.talker.state_dict().items())
    with pytest.raises(SystemExit, match=r"talker\.safetensors is not there: run python -m training\.talker first"):
        learner.begin_with(tmp_path / "none")
