"""Writes how the installed vLLM's functions that we rely on are called: a step of docs/extend/upgrading.md."""

from __future__ import annotations

import json
from pathlib import Path

from omni_cluster.models.registry import family_class, known_families
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.vllm_engine.relied_on import EVERYWHERE, Names
from omni_cluster.vllm_engine.version_check import SIGNATURES, signatures_of


def relied_on_by_file(checkpoint: Path) -> dict[Path, Names]:
    """What is relied on, by the file that has its signatures: the room's one, and one of each family."""
    files: dict[Path, Names] = {SIGNATURES: EVERYWHERE}
    folder = SIGNATURES.parents[1] / "models"
    for name in known_families():
        if (file := folder / name / "signatures.json").is_file():
            specs = family_class(name)(checkpoint).specs.values()
            stages = [spec.traits.relied_on for spec in specs if isinstance(spec, ARSpec)]
            files[file] = {path: names for stage in stages for path, names in stage.items()}
    return files


def main() -> None:
    from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint

    for file, names in relied_on_by_file(embedded_checkpoint("tiny")).items():
        file.write_text(json.dumps(signatures_of(names), indent=1) + "\n")


if __name__ == "__main__":
    main()
