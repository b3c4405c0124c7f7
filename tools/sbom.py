"""Writes what this environment holds as a CycloneDX bill of materials: `python -m tools.sbom OUT.json`.

Python's packages, and Debian's where the host has them, each with its licence and the licence's text. It needs the
standard library alone, so that an image can run it.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

SPEC: Final = "1.6"
PROJECT: Final = "omni-cluster"
DEBIAN_TEXTS: Final = Path("/usr/share/doc")
_TEXT_NAME: Final = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|THIRD.?PARTY)", re.IGNORECASE)
_NO_TEXT: Final = {".py", ".pyc", ".pyi", ".json", ".html", ".so", ".h"}


@dataclass(frozen=True, slots=True)
class Package:
    """A package with what it says of its licence.

    `expression`: in SPDX's terms. `declared`: names of licences, as its authors wrote them. `texts`: by path.
    `bills`: paths of bills of materials of its own, for what is built into its binaries.
    """

    name: str
    version: str
    url: str
    expression: str | None = None
    declared: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    bills: tuple[str, ...] = ()


def python_packages(found: Iterable[Distribution] | None = None) -> list[Package]:
    """Of this environment, unless `found` has others; each once, by name."""
    packages = {each.name: each for each in map(_python_package, distributions() if found is None else found)}
    return [packages[name] for name in sorted(packages)]


def debian_packages() -> list[Package]:
    """What dpkg has installed here; none on another system."""
    if shutil.which("dpkg-query") is None:
        return []
    form = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"
    asked = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in asked.stdout.splitlines()]
    return [_debian_package(*row) for status, *row in rows if status == "installed"]


def bill(packages: Iterable[Package]) -> dict[str, Any]:
    """The document, which is the same for the same packages."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"component": {"type": "application", "name": PROJECT, "version": version(PROJECT)}},
        "components": [_component(each) for each in packages],
    }


def without_licence(packages: Iterable[Package]) -> list[str]:
    """Names of those that have neither an expression nor a text."""
    return [each.name for each in packages if not each.expression and not each.texts]


def _python_package(found: Distribution) -> Package:
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    texts = dict(_python_texts(found))
    header = _header(found, "License") or ""
    if "\n" in header.strip():
        texts["METADATA"] = header
    return Package(
        name=name,
        version=found.version,
        url=f"pkg:pypi/{name}@{quote(found.version, safe='')}",
        expression=_header(found, "License-Expression"),
        declared=tuple(_declared(header, found.metadata.get_all("Classifier") or [])),
        texts=texts,
        bills=tuple(str(path) for path in found.files or [] if path.parent.name == "sboms" and path.suffix == ".json"),
    )


def _header(found: Distribution, name: str) -> str | None:
    return next(iter(found.metadata.get_all(name) or []), None)


def _declared(header: str, classifiers: Iterable[str]) -> Iterator[str]:
    yield from (each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: "))
    if "\n" not in header.strip() and header.strip() not in ("", "UNKNOWN"):
        yield header.strip()


def _python_texts(found: Distribution) -> Iterator[tuple[str, str]]:
    for path in found.files or []:
        if _TEXT_NAME.match(path.name) and path.suffix not in _NO_TEXT:
            place = Path(str(path.locate()))
            if place.is_file():
                yield str(path), place.read_text(encoding="utf-8", errors="replace")


def _debian_package(name: str, version: str, architecture: str) -> Package:
    path = DEBIAN_TEXTS / name / "copyright"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    system = platform.freedesktop_os_release().get("ID", "debian")
    return Package(
        name=name,
        version=version,
        url=f"pkg:deb/{system}/{quote(name)}@{quote(version, safe='')}?arch={architecture}",
        declared=tuple(sorted(set(re.findall(r"^License: *(\S.*)$", text, re.MULTILINE)))),
        texts={str(path): text} if text else {},
    )


def _component(package: Package) -> dict[str, Any]:
    named = [{"license": {"name": name}} for name in package.declared]
    texts = [
        {"license": {"name": path, "text": {"contentType": "text/plain", "content": text}}}
        for path, text in package.texts.items()
    ]
    licences = [{"expression": package.expression}] if package.expression else named
    fields = {
        "type": "library",
        "bom-ref": package.url,
        "name": package.name,
        "version": package.version,
        "purl": package.url,
        "licenses": licences,
        "evidence": {"licenses": texts} if texts else {},
        "externalReferences": [{"type": "bom", "url": quote(path)} for path in package.bills],
    }
    return {key: value for key, value in fields.items() if value}


def main(out: Path) -> None:
    packages = [*python_packages(), *debian_packages()]
    out.write_text(json.dumps(bill(packages), indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {len(packages)} packages; with neither a licence's expression nor its text:")
    print(", ".join(without_licence(packages)) or "none")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
