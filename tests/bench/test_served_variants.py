"""Variants of a configuration, as the benchmark of them serves one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.served_variants import bench_arguments, line
from omni_cluster.bench.result import Cell, Percentiles
from omni_cluster.config.loader import load_config
from training.changes import variant_of

ONE_CARD = Path(__file__).parents[2] / "stage_configs" / "qwen2_5_omni_one_gpu.yaml"


def test_changes_reach_stages_by_name_and_what_all_stages_share(tmp_path: Path) -> None:
    words = ["low", "talker.card_priority=low", "code2wav.options.max_streams=32", "handover.kept_rows_bytes=0"]
    given = yaml.safe_load(ONE_CARD.read_text())
    (path := tmp_path / "changed.yaml").write_text(yaml.safe_dump(variant_of(*words).of(given)))
    shipped, changed = (load_config(each, known_families=["qwen2_5_omni"]) for each in (ONE_CARD, path))
    _, talker, code2wav = changed.stages
    assert (talker.card_priority, code2wav.options["max_streams"]) == ("low", 32)
    assert changed.handover.kept_rows_bytes == 0 and changed.stages[0] == shipped.stages[0]
    assert given == yaml.safe_load(ONE_CARD.read_text())


@pytest.mark.parametrize(
    ("cell", "arguments"),
    [
        ("1", ["--burst", "--concurrency", "1", "--requests", "8"]),
        ("16", ["--burst", "--concurrency", "16", "--requests", "32"]),
        ("2.5/s", ["--rate", "2.5", "--seconds", "30"]),
        ("32c", ["--concurrency", "32", "--requests", "128"]),
    ],
)
def test_cells_are_loads_of_the_bench(cell: str, arguments: list[str]) -> None:
    assert bench_arguments(cell, 30) == arguments


def test_a_line_of_the_table_has_a_cell_s_figures() -> None:
    figures = {"first_audio_s": Percentiles(0.2, 0.3, 0.5, 0.4)}
    cell = Cell("open", 3, 90, 1, 30.0, 2.9, 29.7, figures, gapless_share=0.975)
    assert line("low", cell) == "| low | open 3/s | 2.90 | 1 | - | 0.200 / 0.400 | 98 % | - | - |"
