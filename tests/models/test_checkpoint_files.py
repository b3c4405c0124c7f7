from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_cluster.models.checkpoint_files import (
    checkpoint_folder,
    load_tensors,
    read_config,
    tensor_file,
    tensor_names,
    tensor_rows,
)
from omni_cluster.types.errors import ConfigError

TENSORS = {
    "a.table": torch.arange(20, dtype=torch.float32).view(10, 2),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "b.table": torch.full((2, 2), 7.0),
}
PLACES = {"a.table": "one.safetensors", "a.bias": "two.safetensors", "b.table": "two.safetensors"}


@pytest.fixture(params=["single", "sharded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "single":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return tmp_path
    for place in set(PLACES.values()):
        save_file({n: t for n, t in TENSORS.items() if PLACES[n] == place}, tmp_path / place)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": PLACES}))
    return tmp_path


def no_preset(name: str) -> Path:
    raise AssertionError(name)


def test_tensors_under_a_prefix_lose_it(folder: Path) -> None:
    loaded = load_tensors(folder, "a.", torch.device("cpu"))
    assert loaded.keys() == {"table", "bias"}
    assert torch.equal(loaded["table"], TENSORS["a.table"]) and torch.equal(loaded["bias"], TENSORS["a.bias"])
    assert loaded["bias"].dtype == torch.bfloat16


def test_names_are_grouped_by_the_file_that_holds_them(folder: Path) -> None:
    by_file = tensor_names(folder, "a.")
    assert sorted(name for names in by_file.values() for name in names) == ["a.bias", "a.table"]
    assert all(
        path == tensor_file(folder, name) and path.is_file() for path, names in by_file.items() for name in names
    )


def test_prefix_that_nothing_has_gives_nothing(folder: Path) -> None:
    assert tensor_names(folder, "c.") == {} and load_tensors(folder, "c.", torch.device("cpu")) == {}


def test_rows_come_in_the_order_that_was_asked(folder: Path) -> None:
    assert torch.equal(tensor_rows(folder, "a.table", [9, 0, 9]), TENSORS["a.table"][[9, 0, 9]])


def test_preset_is_asked_of_the_family(tmp_path: Path) -> None:
    asked = []

    def preset(name: str) -> Path:
        asked.append(name)
        return tmp_path

    assert checkpoint_folder("preset:tiny", preset) == tmp_path
    assert asked == ["tiny"]


def test_folder_with_a_config_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert checkpoint_folder(str(tmp_path), no_preset) == tmp_path.resolve()
    assert read_config(tmp_path) == {"a": 1}


def test_folder_may_be_relative_and_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("checkpoint", no_preset) == (tmp_path / "checkpoint").resolve()


def test_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_folder("~", no_preset) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["there", "missing"])
def test_path_without_a_config_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=rf"model is '.*{name}', a folder without config\.json"):
        checkpoint_folder(str(tmp_path / name), no_preset)


@pytest.mark.parametrize("name", ["nobody-at-all/no-such-model", "no such name!", "a/b/c"])
def test_hub_name_that_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model is '{name}', which is no folder here and could not be had"):
        checkpoint_folder(name, no_preset)


def test_both_layouts_of_a_whole_checkpoint_hold_the_same(tiny: Path, tmp_path: Path) -> None:
    from omni_cluster.models.qwen2_5_omni.checkpoint import make_checkpoint

    make_checkpoint("tiny", tmp_path / "sharded", max_shard_bytes=3_000_000)
    whole = load_tensors(tiny, "token2wav.", torch.device("cpu"))
    sharded = load_tensors(tmp_path / "sharded", "token2wav.", torch.device("cpu"))
    assert whole.keys() == sharded.keys() and len(whole) > 10
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    shutil.rmtree(tmp_path / "sharded")
