"""The bill of materials is CycloneDX's, has each package of this environment, and names those without a licence."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import is_expression
from cyclonedx.validation.json import JsonStrictValidator

from tools.sbom import SPEC, Package, bill, debian_packages, main, python_packages, without_licence

WITHOUT = {
    "cuda-toolkit": "names NVIDIA's packages and has no file",
    "jsonschema-rs": "MIT",
    "loguru": "MIT",
    "model-hosting-container-standards": "Apache-2.0",
    "nvidia-ml-py": "BSD",
    "opencensus-context": "Apache-2.0",
    "packageurl-python": "MIT",
    "flatbuffers": "Apache-2.0",
    "tokenizers": "Apache-2.0",
    "z3-solver": "MIT",
}
"""Packages of `cpu` and `gpu` whose wheels have neither a licence's text nor an expression, with what they declare."""


@pytest.fixture(scope="module")
def packages() -> list[Package]:
    """Of this environment, without those that tests bring."""
    return python_packages(distributions(path=[sysconfig.get_path("purelib")]))


def test_each_package_has_a_licence_s_text_or_expression(packages: list[Package]) -> None:
    assert set(without_licence(packages)) == set(WITHOUT) & {each.name for each in packages}


def test_what_has_neither_declares_one_in_other_ways(packages: list[Package]) -> None:
    bare = [each for each in packages if each.name in WITHOUT]
    assert [each.name for each in bare if not each.declared] == ["cuda-toolkit"]


def test_expressions_are_of_spdx(packages: list[Package]) -> None:
    expressions = {each.name: each.expression for each in packages if each.expression}
    assert expressions["omni-cluster"] == "Apache-2.0"
    unknown = {name: each for name, each in expressions.items() if not is_expression(each)}
    assert [name for name, each in unknown.items() if not re.fullmatch(r"LicenseRef-[\w.-]+", each)] == []


def test_each_folder_of_an_installed_package_is_listed(packages: list[Package]) -> None:
    folders = Path(sysconfig.get_path("purelib")).glob("*.dist-info")
    installed = {re.sub(r"[_.]", "-", folder.stem.partition("-")[0]).lower() for folder in folders}
    assert {"omni-cluster", "torch", "ray"} <= installed
    assert installed == {each.name for each in packages}


@pytest.mark.full
def test_the_file_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path / "sbom.json")
    text = (tmp_path / "sbom.json").read_text()
    assert JsonStrictValidator(SchemaVersion.from_version(SPEC)).validate_str(text) is None
    (component,) = [each for each in json.loads(text)["components"] if each["name"] == "pyyaml"]
    assert component["purl"].startswith("pkg:pypi/pyyaml@") and component["licenses"]
    assert "Permission is hereby granted" in component["evidence"]["licenses"][0]["license"]["text"]["content"]
    named = capsys.readouterr().out.splitlines()[-1].split(", ")
    assert named == without_licence([*python_packages(), *debian_packages()])


def test_a_file_that_is_not_of_the_format_is_found(packages: list[Package]) -> None:
    document = bill(packages[:1])
    document["components"][0]["type"] = "thing"
    assert JsonStrictValidator(SchemaVersion.from_version(SPEC)).validate_str(json.dumps(document)) is not None


def test_licences_are_read_wherever_a_package_has_them(tmp_path: Path) -> None:
    wheel(tmp_path, "by_expression", "License-Expression: MIT")
    wheel(tmp_path, "by_classifier", "Classifier: License :: OSI Approved :: BSD License")
    wheel(tmp_path, "by_header", "License: Apache 2.0")
    wheel(tmp_path, "by_long_header", "License: Permission is granted\n        to any person")
    wheel(tmp_path, "by_file", "License: UNKNOWN", LICENSE="Do as you like.")
    wheel(tmp_path, "bare", "License: UNKNOWN")
    found = {each.name: each for each in python_packages(distributions(path=[str(tmp_path)]))}
    assert found["by-expression"].expression == "MIT"
    assert found["by-classifier"].declared == ("BSD License",)
    assert found["by-header"].declared == ("Apache 2.0",)
    assert "to any person" in found["by-long-header"].texts["METADATA"]
    assert found["by-file"].texts == {"by_file-1.dist-info/LICENSE": "Do as you like."}
    assert without_licence(found.values()) == ["bare", "by-classifier", "by-header"]


def wheel(folder: Path, name: str, licence: str, **files: str) -> None:
    """What an installer leaves of a wheel, as far as it is read."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{licence}\n")
    for file, text in files.items():
        (info / file).write_text(text)
    (info / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in ("METADATA", *files)))


def test_debian_s_packages_have_their_copyright_files() -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg is not on this system.")
    found = {each.name: each for each in debian_packages()}
    dpkg = found["dpkg"]
    assert unquote(dpkg.url).endswith(f"/dpkg@{dpkg.version}?arch={dpkg.url.rpartition('=')[2]}")
    assert any("GPL-2" in each for each in dpkg.declared)
    assert "/usr/share/doc/dpkg/copyright" in dpkg.texts
