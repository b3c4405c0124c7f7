"""The one folder for what engines compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from omni_cluster.engine.caches import PARTS, use_cache_dir
from omni_cluster.types.errors import ConfigError

# Torch's word for Triton's folder is the one that a process which compiles a graph would set, had it none.
SHOW = """
import os, sys
from omni_cluster.engine.caches import use_cache_dir
use_cache_dir(sys.argv[1])
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from triton import knobs
print(knobs.cache.dir, triton_cache_dir(0), cache_dir(), os.environ["VLLM_CACHE_ROOT"])
"""


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for name in PARTS:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards


def test_triton_and_torch_keep_what_they_compile_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    printed = subprocess.run(
        [sys.executable, "-c", SHOW, str(folder)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed == [str(folder / part) for part in ("triton", "triton", "inductor", "vllm")]


def test_without_a_folder_it_is_the_users_cache_folder(tmp_path: Path) -> None:
    folder = use_cache_dir(None)
    assert folder == tmp_path / "caches" / "omni_cluster" / "compiled"
    assert {os.environ[name] for name in PARTS} == {str(folder / part) for part in PARTS.values()}


def test_what_torch_set_by_itself_is_nobody_s_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    folder = use_cache_dir(None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")


def test_a_variable_that_is_set_holds_where_no_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    use_cache_dir(None)
    assert os.environ["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert os.environ["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    use_cache_dir(str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    unwritable = "where nothing can be written"
    with pytest.raises(ConfigError, match=rf"^cache_dir is '{re.escape(str(file))}/kept', {unwritable}"):
        use_cache_dir(f"{file}/kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ConfigError, match=rf"^cache_dir is not set and so .*/omni_cluster/compiled, {unwritable}"):
        use_cache_dir(None)
