import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import one_hot

from omni_cluster.types.errors import ConfigError
from tests.training.sayings import seconds_are_steps
from training.hearing import READER, TOWER, HearingPlan, HearingTrainer, Sounds
from training.pool import make_pool
from training.reader import BLANK, LETTERS, Reader
from training.recordings import Hearing
from training.thinker import Learner
from training.world import Split


@pytest.fixture(scope="module")
def pool(espeak):
    return make_pool(Split.TRAIN, pieces=40, pictures=0, seed=1, cores=0)


def reader_of_signs():
    """Its rows are signs, each as one that is sure."""
    reader = Reader(len(LETTERS) + 1)
    torch.nn.init.eye_(reader.letters.weight)
    torch.nn.init.zeros_(reader.letters.bias)
    return reader


def rows_of(text):
    """`_` is no letter."""
    signs = torch.tensor([BLANK if sign == "_" else LETTERS.index(sign) for sign in text])
    return 50.0 * one_hot(signs, len(LETTERS) + 1)


def hearing_of(tokens):
    """`tokens` of 640 samples."""
    hearing = Hearing(0, tokens * 640)
    assert hearing.tokens == tokens
    return hearing


def test_repeated_letters_are_one_and_what_stands_behind_a_sound_is_not_read():
    rows = torch.stack([rows_of("_aa_a b__"), rows_of("cc_______"), rows_of("ccdeeeeee")])
    assert [*reader_of_signs().read(rows, [hearing_of(9), hearing_of(9), hearing_of(3)])] == ["aa b", "c", "cd"]


def test_the_loss_is_nothing_for_rows_that_say_all_letters_and_the_same_whatever_stands_behind_them():
    reader, said = reader_of_signs(), ["aa b", "cd"]
    hearings = [hearing_of(9), hearing_of(3)]
    right = torch.stack([rows_of("_aa_a b__"), rows_of("c_dxyzxyz")])
    assert float(reader.loss(right, hearings, said).detach()) < 1e-3
    wrong = torch.stack([rows_of("_aa_a c__"), rows_of("c_dxyzxyz")])
    assert float(reader.loss(wrong, hearings, said).detach()) > 5


def test_a_step_s_sounds_are_the_same_again_and_the_first_ones_are_short(pool):
    sounds = Sounds(pool, seed=3, size=16)
    assert sounds[7] == sounds[7] != sounds[8]

    def longest(step):
        return max(pool.recorded(each.piece) for [given] in [sounds[step]] for each in given.hearings)

    assert longest(0) <= sorted(pool.recorded(piece) for piece in range(40))[4]
    assert max(longest(step) for step in range(1_500, 1_530)) == max(pool.recorded(piece) for piece in range(40))


def test_the_examination_asks_each_sound_once(pool):
    asked = [each.piece for given in Sounds(pool, 0, 16).examination() for each in given.hearings]
    assert sorted(asked) == [*range(40)]


def test_it_learns_goes_on_and_a_thinker_begins_with_it(pool, tmp_path, monkeypatch):
    plan = HearingPlan(out=tmp_path, minutes=30 / 60, size=8)
    with seconds_are_steps(monkeypatch):
        first = HearingTrainer(replace(plan, at_most=3 / 60), pool, pool)
        untrained = loss_of(first)
        first.train()
    with seconds_are_steps(monkeypatch):
        later = HearingTrainer(plan, pool, pool)
        assert later.run.step == 3
        accuracies = later.train()
    assert later.run.step == 30
    assert loss_of(later) < 0.85 * untrained
    assert json.loads((tmp_path / "hearing.json").read_text()) == {"step": 30, "accuracies": accuracies}

    thinker = Learner()
    thinker.begin_with(tmp_path)
    kept = load_file(tmp_path / TOWER)
    for name, tensor in thinker.thinker.audio_tower.state_dict().items():
        torch.testing.assert_close(tensor, kept[f"thinker.audio_tower.{name}"].float(), atol=0, rtol=0)
    for name, tensor in load_file(tmp_path / READER).items():
        torch.testing.assert_close(thinker.reader.state_dict()[name], tensor, atol=0, rtol=0)


def test_a_folder_without_weights_is_nothing_to_begin_with(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has none of thinker\.safetensors, audio_tower\.safetensors, visual\.safetensors"
    ):
        Learner().begin_with(tmp_path)


@torch.no_grad()
def loss_of(run):
    """Of a step that is not trained on."""
    [given] = run._data[1 << 20]
    return float(run.losses(given, 0)["ctc"]) / len(given.hearings)
