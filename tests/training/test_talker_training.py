"""The talker's training: what it reads is what transformers' whole model gives its talker, and it learns."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from training.batches import Batch, Reply
from training.checkpoint import CODEC_MARKS, toy_config
from training.pool import make_pool
from training.speaking import END, speech_of
from training.talker import WEIGHTS, Learner, Plan, TalkerTrainer, codes_of_all
from training.thinker import WEIGHTS as THINKER_WEIGHTS
from training.thinking import Media
from training.world import Split, items

CPU = torch.device("cpu")
NO_SOUND = {
    "dit_config": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "emb_dim": 32,
        "look_ahead_layers": [0], "look_backward_layers": [1], "enc_dim": 16, "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 16, "enc_res2net_scale": 2, "enc_se_channels": 16, "num_embeds": CODEC_MARKS - 1,
    },
    "bigvgan_config": {"upsample_initial_channel": 64},
}  # fmt: skip


class Spoken(torch.nn.Module):
    """Takes code2wav's place, and keeps its codes."""

    dtype = torch.float32

    def forward(self, codes, **_):
        self.codes = codes[0].tolist()
        return torch.zeros(1)


@pytest.fixture(scope="module")
def whole():
    """The toy of random weights, whose codes differ from place to place."""
    config = toy_config()
    config.token2wav_config = type(config.token2wav_config)(**NO_SOUND)
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(config).eval()
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
    picture = np.random.RandomState(0).randint(0, 256, (112, 168, 3)).astype(np.uint8)
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
    logits = learner(batch, speech_of(batch, [codes], [voice], [codes]), Media(pool, CPU), seed=0)
    logits[:, CODEC_MARKS + 1] = -torch.inf  # the codec's start, which transformers suppresses
    assert logits.argmax(1)[: len(codes)].tolist() == codes


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
        ids, positions.long().numpy(), none, none, none, ["picture"], [reply], shown={(4, 6): [0]},
        shown_to={(4, 6): is_picture},
    )  # fmt: skip


def letters(text):
    """As many codes as letters, for want of a codebook."""
    return [ord(letter) - 30 for letter in text]


@pytest.fixture
def plan(toy_copy, whole):
    weights = {f"thinker.{name}": each for name, each in whole.thinker.state_dict().items()}
    save_file(weights, toy_copy / THINKER_WEIGHTS)
    return Plan(out=toy_copy, minutes=5, of_minutes=5, size=12, exam=8, most_tokens=2_000, warm_up=5)


def trainer(plan):
    pool = make_pool(Split.TRAIN, 8, 4, 0, 0)
    exam = make_pool(Split.HELD_OUT, 8, 4, 0, 0)
    said = [next(items(Split.TRAIN, seed)) for seed in range(20)]
    codes = codes_of_all([*said, *pool.spoken, *pool.shown, *exam.spoken, *exam.shown], letters)
    return TalkerTrainer(plan, pool, exam, said, codes)


def test_it_learns_what_is_said_and_leaves_the_thinker_as_it_is(plan):
    run = trainer(replace(plan, steps=15))
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
            assert speech.targets[speech.owners == number].tolist() == [*letters(reply.text), END]


def test_some_of_what_it_is_fed_is_misheard_but_not_what_it_is_to_say():
    from training.speaking import _misheard

    codes = [*range(1_000)]
    fed = _misheard(codes, 0.05, Random(0))
    assert 20 < sum(one != other for one, other in zip(codes, fed, strict=True)) < 90
