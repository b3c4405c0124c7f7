"""The version is in one place, and the page of the installation has the versions that are needed and were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = ROOT / "docs" / "start" / "install.md"
MINORS = [f"3.{minor}" for minor in range(8, 20)]


def table() -> dict[str, tuple[str, str]]:
    """What is needed, and what figures are of, by the names of the rows."""
    section = PAGE.read_text().partition("\n## Versions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \| (.*) \|$", section, re.MULTILINE)
    return {name: (needs, measured) for name, needs, measured in rows}


def needed() -> dict[str, SpecifierSet]:
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, asked)}


def machines() -> Iterator[dict[str, Any]]:
    """Those with cards, as the files of results tell of them."""
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.json")):
        yield from (each for each in _objects(json.loads(path.read_text())) if each.get("cards"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "versions" in value:
            yield value
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


def measured(package: str) -> set[str]:
    return {each["versions"][package] for each in machines() if package in each["versions"]}


def test_what_is_installed_has_the_project_s_version() -> None:
    assert metadata.version(PROJECT["name"]) == PROJECT["version"], "run `make setup`"


def test_the_newest_section_of_the_changelog_is_of_the_project_s_version() -> None:
    newest = re.search(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|not released yet", newest[2])


def test_no_module_has_a_version_of_its_own() -> None:
    sources = [path for folder in ("omni_cluster", "deployments") for path in (ROOT / folder).rglob("*.py")]
    said = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']""")
    assert [path for path in sources if said.search(path.read_text())] == []


def test_pythons() -> None:
    allowed = [minor for minor in MINORS if minor in SpecifierSet(PROJECT["requires-python"])]
    assert table()["Python"][0] == f"{allowed[0]} to {allowed[-1]}"
    marked = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert marked == allowed
    assert table()["Python"][1] == ", ".join(sorted({each["python"].rpartition(".")[0] for each in machines()}))


def test_packages_that_are_pinned() -> None:
    for row, package in {"vLLM": "vllm", "Ray": "ray", "torch": "torch"}.items():
        needs, figures = table()[row]
        assert f"=={needs}" == str(needed()[package])
        assert figures.partition(";")[0] == ", ".join(sorted(measured(package)))
    pinned = {requirement: each for requirement, each in needed().items() if requirement in ("ray", "torch")}
    assert [name for name, each in pinned.items() if metadata.version(name) not in each] == []


def test_transformers() -> None:
    needs, figures = table()["transformers"]
    first, last = needs.split(" to ")
    major, minor = map(int, last.split("."))
    assert needed()["transformers"] == SpecifierSet(f">={first},<{major}.{minor + 1}")
    assert metadata.version("transformers") in needed()["transformers"]
    assert figures == ", ".join(sorted(measured("transformers")))


def test_cuda_and_cards() -> None:
    asked = [Requirement(each) for each in metadata.requires("torch") or []]
    (toolkit,) = {str(each.specifier) for each in asked if each.name == "cuda-toolkit"}
    assert table()["CUDA"] == (
        f"{'.'.join(toolkit.removeprefix('==').split('.')[:2])}, which torch brings",
        f"driver {', '.join(sorted({each['driver'] for each in machines()}))}",
    )
    cards = table()["cards"][1].split(", ")
    results = "\n".join(path.read_text() for path in (ROOT / "benchmarks" / "results").rglob("*.txt"))
    assert {card for each in machines() for card in each["cards"]} <= {f"NVIDIA {card}" for card in cards}
    assert [card for card in cards if card not in results] == []


def test_the_override_is_torch_as_it_is_needed() -> None:
    (override,) = re.findall(r"^echo (torch==\S+) > torch\.txt$", PAGE.read_text(), re.MULTILINE)
    assert Requirement(override).specifier == needed()["torch"]
