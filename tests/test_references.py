"""The generated pages are what their sources give, every key has a meaning, and the site builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_cluster.engine.metric_definitions import ALL
from tools.configuration_reference import LINKS, undescribed
from tools.references import DOCS, PAGES, whole_page

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_what_its_source_gives(path: str) -> None:
    assert (DOCS / path).read_text() == whole_page(path), "run `make docs`, and commit what it wrote"


def test_each_key_has_a_meaning() -> None:
    assert undescribed() == []


def test_each_link_is_of_a_key_that_is_there() -> None:
    assert PAGES["operate/configuration.md"]().count("[More](") == len(LINKS)


def test_each_metric_has_its_row_once() -> None:
    page = PAGES["operate/metrics.md"]()
    assert [page.count(f"| `{each.name}` | {each.kind} |") for each in ALL] == [1] * len(ALL)


def test_the_generator_loads_without_the_heavy_libraries() -> None:
    code = "import sys, tools.references as r; [page() for page in r.PAGES.values()]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"vllm", "ray", "torch", "transformers"} & set(done.stdout.split())


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: no dead link, no page outside the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
