import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.sayings import seconds_are_steps
from training import hearing, thinker
from training.pool import make_pool
from training.seeing import TOWER, TURNS, Drawings, Gallery, SeeingPlan, SeeingTrainer, Shown
from training.trainer import halved
from training.words import COLOURS, SHAPES
from training.world import Split


@pytest.fixture(scope="module")
def pool():
    return make_pool(Split.TRAIN, pieces=0, pictures=32, seed=1, cores=0)


@pytest.fixture(scope="module")
def held_out():
    return make_pool(Split.HELD_OUT, pieces=0, pictures=16, seed=1, cores=0)


def test_a_step_s_pictures_are_the_same_again_and_lie_in_all_ways():
    drawings = Drawings(40, seed=3, size=16)
    assert drawings[7] == drawings[7] != drawings[8]
    assert {drawings[step][0].turn for step in range(100)} == {*range(TURNS)}


def test_the_examination_asks_each_picture_once_as_it_is_drawn():
    asked = Drawings(40, 0, 16).examination()
    assert [number for given in asked for number in given.numbers] == [*range(40)]
    assert {given.turn for given in asked} == {0}


def test_turns_lay_a_picture_in_as_many_ways_and_change_none_of_its_pixels(pool):
    gallery = Gallery(pool, torch.device("cpu"))
    ways = [gallery.pictures(Shown([5], turn))[0].numpy() for turn in range(TURNS)]
    np.testing.assert_array_equal(ways[0], pool.pictures[5])
    assert len({way.tobytes() for way in ways}) == TURNS
    assert len({np.sort(way, axis=None).tobytes() for way in ways}) == 1


def test_pictures_are_named_by_what_is_drawn(pool):
    named = Gallery(pool, torch.device("cpu")).named(Shown([3, 9]))
    drawn = [pool.shown[number].picture for number in (3, 9)]
    assert [(COLOURS[colour], SHAPES[shape]) for colour, shape in named] == [(it.colour, it.shape) for it in drawn]


def test_it_learns_goes_on_and_a_thinker_begins_with_it(pool, held_out, tmp_path, monkeypatch):
    plan = SeeingPlan(out=tmp_path, minutes=60 / 60, size=16)
    with seconds_are_steps(monkeypatch):
        first = SeeingTrainer(replace(plan, at_most=3 / 60), pool, held_out)
        untrained = losses_of(first)
        first.train()
    with seconds_are_steps(monkeypatch):
        later = SeeingTrainer(plan, pool, held_out)
        assert later.run.step == 3
        accuracies = later.train()
    assert later.run.step == 60
    trained = losses_of(later)
    assert all(trained[name] < 0.75 * untrained[name] for name in ("colour", "shape"))
    assert json.loads((tmp_path / "seeing.json").read_text()) == {"step": 60, "accuracies": accuracies}

    begun = thinker.Learner()
    begun.begin_with(tmp_path)
    kept = load_file(tmp_path / TOWER)
    for name, tensor in begun.thinker.visual.state_dict().items():
        torch.testing.assert_close(tensor, kept[f"thinker.visual.{name}"].float(), atol=0, rtol=0)


def test_a_thinker_begins_with_both_towers_of_a_folder(tmp_path):
    trained = thinker.Learner().thinker
    save_file(halved(trained.visual, "thinker.visual"), tmp_path / TOWER)
    save_file(halved(trained.audio_tower, "thinker.audio_tower"), tmp_path / hearing.TOWER)
    begun = thinker.Learner()
    begun.begin_with(tmp_path)
    for name in ("visual.merger.mlp.0.weight", "audio_tower.proj.weight"):
        torch.testing.assert_close(begun.thinker.get_parameter(name), trained.get_parameter(name).half().float())


@torch.no_grad()
def losses_of(run):
    """Of a step that is not trained on."""
    [given] = run._data[1 << 20]
    return {name: float(loss) / len(given.numbers) for name, loss in run.losses(given, 0).items()}
