"""Python modules that an installation left uncompiled are compiled where Python looks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_cluster.engine.python_modules import CompiledModules, compile_modules, installed_folders


def test_what_is_not_compiled_is_and_the_next_process_reads_it(tmp_path: Path) -> None:
    (package := tmp_path / "package").mkdir()
    for name, source in {"__init__": "", "one": "from . import two", "two": "print(__spec__.cached)"}.items():
        (package / f"{name}.py").write_text(source)
    (package / "python_2.py").write_text("print 1")
    assert compile_modules([tmp_path]) == CompiledModules(done=3, left=1)
    told = subprocess.run(
        [sys.executable, "-v", "-c", "import package.one"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert Path(told.stdout.strip()).exists()
    for name in ("__init__", "one", "two"):
        assert f"code object from '{package}/__pycache__/{name}." in told.stderr  # not from the source
    assert compile_modules([tmp_path]) == CompiledModules(done=0, left=1)


def test_a_folder_within_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (info := tmp_path / "outer" / "inner" / "a-1.dist-info").mkdir(parents=True)
    (tmp_path / "outer" / "b-1.dist-info").mkdir()
    for each in (info, tmp_path / "outer" / "b-1.dist-info"):
        (each / "METADATA").write_text(f"Name: {each.name[0]}\nVersion: 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "outer"), str(info.parent)])
    assert [each for each in installed_folders() if each.is_relative_to(tmp_path)] == [tmp_path / "outer"]


def test_a_folder_whose_modules_are_compiled_costs_a_look(tmp_path: Path) -> None:
    assert compile_modules([tmp_path]) == CompiledModules(done=0, left=0)


def test_the_engines_packages_and_the_project_s_own_are_looked_for() -> None:
    folders = installed_folders()
    for package in ("vllm", "torch", "transformers", "ray"):
        assert any((folder / package).is_dir() for folder in folders)
    assert any(folder.name == "omni_cluster" for folder in folders)
