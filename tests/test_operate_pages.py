"""What the pages for operators name is there: commands and their options, keys, metrics, and panels of the board."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

from omni_cluster.cli import _parser
from omni_cluster.config.access import ApiConfig
from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.limits import Limits
from omni_cluster.config.media import DecodersConfig, FetchConfig
from omni_cluster.engine.metric_definitions import ALL
from omni_cluster.openai_api.access import OPEN_PATHS
from omni_cluster.server.endpoints.playground import PATHS as PLAYGROUND_PATHS

ROOT = Path(__file__).parent.parent
NAMES = ("operations", "monitoring", "reliability", "security", "clusters", "memory", "planning")
PAGES = {name: (ROOT / f"docs/operate/{name}.md").read_text() for name in NAMES}
KEYS: dict[str, type[BaseModel]] = {
    "api": ApiConfig,
    "decoders": DecodersConfig,
    "fetch": FetchConfig,
    "handover": HandoverConfig,
    "limits": Limits,
}
PANEL = re.compile(r"(?<!\*)\*([A-Z][A-Za-z -]+)\*(?!\*)")
"""Names of panels, and of rows, are in italics."""


def spans(page: str) -> list[str]:
    """Code in lines, and the lines of blocks."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [*lines, *re.findall(r"(?<!`)`([^`\n]+)`", page)]


def options_of(tool: str, command: str) -> set[str]:
    """Of `serve run` for example; raises KeyError for a command that is none."""
    if tool == "omni-cluster":
        (commands,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
        return set(commands.choices[command]._option_string_actions)
    group = ray_cli if tool == "ray" else serve_cli
    return {name for param in group.commands[command].params for name in (*param.opts, *param.secondary_opts)}


def wrong_commands(page: str) -> list[str]:
    wrong = []
    for span in spans(page):
        for tool, command, rest in re.findall(r"(?:^|&& |')(ray|serve|omni-cluster) ([a-z][a-z-]+)([^&#|]*)", span):
            try:
                known = options_of(tool, command)
            except KeyError:
                wrong.append(f"{tool} {command}")
                continue
            given = set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest))
            wrong += [f"{tool} {command} {option}" for option in sorted(given - known)]
    return wrong


def metrics_of(page: str) -> set[str]:
    """Names without Ray's prefix and the ends that it gives."""
    return {name for span in spans(page) for name in re.findall(r"omni_cluster_(?:stage|ingress|scrape)_\w+", span)}


def known_metrics() -> set[str]:
    ends = ("", "_bucket_total", "_sum_total", "_count_total")
    return {each.name + end for each in ALL for end in (ends if each.kind == "histogram" else ends[:1])}


def panels() -> set[str]:
    board = json.loads((ROOT / "deploy/grafana/omni_cluster.json").read_text())
    return {panel["title"] for panel in board["panels"]}


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options_are_there(name: str) -> None:
    assert wrong_commands(PAGES[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_defined(name: str) -> None:
    assert metrics_of(PAGES[name]) <= known_metrics()


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_of_the_schema(name: str) -> None:
    for span in spans(PAGES[name]):
        for of, key in re.findall(rf"^({'|'.join(KEYS)})\.(\w+)$", span):
            assert key in KEYS[of].model_fields, span


def test_panels_are_on_the_board() -> None:
    named = {name for page in ("operations", "monitoring") for name in PANEL.findall(PAGES[page])}
    assert len(named) > 5 and named <= panels()
    table = PAGES["monitoring"].split("| panel | bad | do |")[1].split("\n\n")[0]
    first = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert {name for cell in first for name in cell.split(", ")} <= panels()


def test_the_front_page_leads_to_each_task() -> None:
    front = (ROOT / "docs/index.md").read_text()
    tasks = re.findall(r"^## (Add|Change|Read|Find|Scale|Roll|Drain|Limit)(.*)$", PAGES["operations"], re.MULTILINE)
    anchors = [(first + rest).lower().replace(" ", "-") for first, rest in tasks]
    assert len(anchors) == 9
    assert [each for each in anchors if f"operations.md#{each})" not in front] == []
    assert "monitoring.md#read-first-audio-p95-in-grafana)" in front


def test_what_is_not_there_is_found() -> None:
    assert wrong_commands("`serve runn`, `ray up --now x.yaml`, `omni-cluster check a.yaml --card-gb 80`") == [
        "serve runn",
        "ray up --now",
        "omni-cluster check --card-gb",
    ]
    assert metrics_of("`omni_cluster_stage_requests`") - known_metrics()


def test_what_needs_no_key_is_named_whole() -> None:
    told = [line for page in PAGES.values() for line in page.splitlines() if re.search(r"\bbut `/health`", line)]
    assert len(told) == 3 and "/" in PLAYGROUND_PATHS and set(OPEN_PATHS) == {"/health"}
    assert [line for line in told if not re.search(r"`/health` and the(?: \[?playground|$)", line)] == []
