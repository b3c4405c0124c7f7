"""The thinker's training: what it reads, that it learns, and that it goes on where it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from tests.training.sayings import seconds_are_steps
from training.batches import TYPED_ONLY, Asked, Batcher, Conversations, Mix, examination
from training.checkpoint import toy_config
from training.layout import Layout
from training.pool import kept_pool, make_pool
from training.thinker import READER, WEIGHTS, Learner, Media, ThinkerPlan, ThinkerTrainer
from training.world import Split

CPU = torch.device("cpu")
VOICES = Mix(spoken=100, shown=30, transcripts=30, later=50, long=0)


@pytest.fixture(scope="module")
def pool(espeak):
    return make_pool(Split.TRAIN, pieces=24, pictures=6, seed=1, cores=0)


@pytest.fixture(scope="module")
def layout(toy_folder):
    return Layout(PromptMaker(FileTokenizer(toy_folder)))


def batcher(pool, layout, **changes):
    settings = {"seed": 3, "size": 40, "most_tokens": 4_000, **changes}
    return Batcher(Conversations(pool, Split.TRAIN, VOICES), layout, pool, **settings)


def small(folder, **changes):
    """Typed questions alone."""
    plan = ThinkerPlan(out=folder, minutes=23 / 60, exam=12, size=16, most_tokens=2_000, mix=TYPED_ONLY)
    return replace(plan, **changes)


def trainer(plan):
    empty = make_pool(Split.TRAIN, 0, 0, 0, 0)
    return ThinkerTrainer(plan, empty, make_pool(Split.HELD_OUT, plan.exam, 0, 0, 0))


def test_a_pool_is_the_same_again_and_is_kept(pool, tmp_path):
    again = kept_pool(tmp_path / "pool", lambda: make_pool(Split.TRAIN, pieces=24, pictures=6, seed=1, cores=0))
    kept = kept_pool(tmp_path / "pool", lambda: pytest.fail("it was kept"))
    for each in (again, kept):
        assert each.spoken == pool.spoken
        assert each.shown == pool.shown
        np.testing.assert_array_equal(each.samples, pool.samples)
        np.testing.assert_array_equal(each.pictures, pool.pictures)
    assert {item.split for item in (*pool.spoken, *pool.shown)} == {Split.TRAIN}


def test_a_step_s_batches_are_the_same_again_and_others_than_the_next_ones(pool, layout):
    first, again, other = (batcher(pool, layout)[step] for step in (7, 7, 8))
    assert [each.hearings for each in first] == [each.hearings for each in again] != [each.hearings for each in other]
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.positions, two.positions)


def test_batches_are_within_their_bound_and_hold_all(pool, layout):
    batches = batcher(pool, layout)[0]
    assert len(batches) > 1
    assert all(batch.ids.size <= 4_000 for batch in batches)
    assert sum(len(batch.kinds) for batch in batches) == 40


def test_what_foretells_a_token_stands_before_it(pool, layout):
    for batch in batcher(pool, layout)[0]:
        np.testing.assert_array_equal(batch.ids.reshape(-1)[batch.before + 1], batch.targets)
        assert set(batch.owners) == set(range(len(batch.kinds)))


@torch.inference_mode()
def test_a_batch_comes_to_what_the_processor_and_transformers_make_of_each(toy_folder, pool, layout, monkeypatch):
    torch.manual_seed(0)
    thinker = Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config).eval()
    learner = learner_of(thinker)
    rng = Random(2)
    conversations = Conversations(pool, Split.TRAIN, VOICES)
    asked = [conversations.draw(rng) for _ in range(12)]
    media = Media(pool, CPU)
    for one in asked:
        [batch] = batcher(pool, layout).of([one])
        logits, _ = learner(batch, media, seed=9)
        waves = media.recordings.waves(batch.hearings, 9) if batch.hearings else []
        sounds = [wave[: each.samples].numpy() for wave, each in zip(waves, batch.hearings, strict=True)]
        own = alone(toy_folder, thinker, layout, pool, one, sounds)
        torch.testing.assert_close(logits, own[batch.before], atol=1e-4, rtol=1e-3)


def learner_of(thinker):
    learner = Learner()
    learner.thinker = thinker
    return learner


def alone(folder, thinker, layout, pool, asked: Asked, sounds):
    """Logits `[n, vocabulary]` of a conversation, by transformers' own forward pass."""
    processor = Qwen2_5OmniProcessor.from_pretrained(folder)
    ids = torch.tensor([layout.lay(asked.conversation).ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sounds:
        longest = max(map(len, sounds)) + 200
        heard = processor.feature_extractor(
            sounds, sampling_rate=16_000, max_length=longest, return_tensors="pt", return_attention_mask=True
        )
        inputs |= {"input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]}
    parts = [part for turn in asked.conversation.turns for part in turn.parts if hasattr(part, "rows")]
    if parts:
        inputs |= processor.image_processor(images=[pool.pictures[part.source] for part in parts], return_tensors="pt")
    return thinker(**inputs).logits[0]


def test_it_learns_and_goes_on_where_it_was(espeak, toy_copy, monkeypatch):
    plan = small(toy_copy)
    with seconds_are_steps(monkeypatch):
        first = trainer(replace(plan, at_most=3 / 60))
        untrained = loss_of(first)
        first.train()
    assert first.run.step == 3
    with seconds_are_steps(monkeypatch):
        later = trainer(plan)
        assert later.run.step == 3
        for name, tensor in later.learner.state_dict().items():
            torch.testing.assert_close(tensor, first.learner.state_dict()[name], atol=0, rtol=0)
        accuracies = later.train()
    assert later.run.step == 23
    assert set(accuracies) >= {"typed", "typed add"}
    assert json.loads((plan.out / "thinker.json").read_text())["step"] == 23
    assert loss_of(later) < 0.8 * untrained


@torch.no_grad()
def loss_of(run):
    """Of a step that is not trained on."""
    given = run._data[1 << 20]
    return float(sum(run.losses(each, 0)["loss"] for each in given)) / sum(run.counts(each)["loss"] for each in given)


def test_weights_are_the_thinker_s_in_half_precision_and_another_training_begins_with_them(
    espeak, toy_copy, tmp_path, monkeypatch
):
    plan = small(toy_copy, at_most=2 / 60)
    with seconds_are_steps(monkeypatch):
        trainer(plan).train()
    weights = load_file(plan.out / WEIGHTS)
    with torch.device("meta"):
        own = Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config).state_dict()
    assert weights.keys() == {f"thinker.{name}" for name in own}
    assert {each.dtype for each in weights.values()} == {torch.float16}
    assert (plan.out / READER).is_file()
    fresh = shutil.copytree(toy_copy, tmp_path / "fresh", ignore=shutil.ignore_patterns("thinker.*"))
    begun = trainer(replace(plan, out=fresh, init=plan.out))
    assert begun.run.step == 0
    for name, tensor in begun.learner.thinker.state_dict().items():
        torch.testing.assert_close(tensor, weights[f"thinker.{name}"].float(), atol=0, rtol=0)


def test_the_examination_asks_each_way_and_of_held_out_items_alone(espeak, toy_folder, layout):
    pool = make_pool(Split.HELD_OUT, pieces=12, pictures=6, seed=1, cores=0)
    conversations = Conversations(pool, Split.HELD_OUT, Mix())
    asked = [*examination(pool, conversations, 12)]
    ways = {each.kind.split()[0] for each in asked}
    assert ways == {"typed", "spoken", "transcript"}
    assert {item.split for item in (*pool.spoken, *pool.shown)} == {Split.HELD_OUT}
    assert any("shown" in each.kind for each in asked)
