"""Writes how the installed vLLM's functions that we rely on are called: a step of docs/extend/upgrading.md."""

from __future__ import annotations

import json
from pathlib import Path

from omni_cluster.models.family import Family
from omni_cluster.models.registry import family_class, known_families
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.vllm_engine.relied_on import EVERYWHERE, Names
from omni_cluster.vllm_engine.version_check import SIGNATURES, signatures_of

FOLDER = SIGNATURES.parents[1] / "models"
OURS = tuple(name for name in known_families() if family_class(name).__module__.startswith("omni_cluster."))


def on_its_checkpoint(name: str) -> Family:
    """One of our families, on the first checkpoint that it makes by itself."""
    family = family_class(name)
    return family(family.embedded_checkpoint(family.presets[0]))


def relied_on_by_stage(family: Family) -> list[Names]:
    """What each autoregressive stage of the family relies on."""
    return [spec.traits.relied_on for spec in family.specs.values() if isinstance(spec, ARSpec)]


def relied_on_by_file() -> dict[Path, Names]:
    """What is relied on, by the file that has its signatures: the room's one, and one of each family."""
    files: dict[Path, Names] = {SIGNATURES: EVERYWHERE}
    for name in OURS:
        stages = relied_on_by_stage(on_its_checkpoint(name))
        files[FOLDER / name / "signatures.json"] = joined(*stages)
    return files


def joined(*stages: Names) -> Names:
    """Stages may rely on other members of one class."""
    members: dict[str, list[str]] = {}
    for stage in stages:
        for path, names in stage.items():
            members.setdefault(path, []).extend(names)
    return {path: sorted(set(names)) for path, names in members.items()}


def main() -> None:
    for file, names in relied_on_by_file().items():
        file.write_text(json.dumps(signatures_of(names), indent=1) + "\n")


if __name__ == "__main__":
    main()
