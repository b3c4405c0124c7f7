"""What an image is built from."""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def built_from() -> set[str]:
    """What of the checkout the package is built from, and the files of its deployments."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    described = {project["project"]["readme"], *project["project"]["license-files"]}
    included = {*wheel["packages"], *(path.split("/")[0] for path in wheel["force-include"])}
    return {"pyproject.toml", "Makefile", "deploy", *described, *included}
