"""The table of docs/use/clients.md names the versions that are run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tests.clients.environments import REQUIREMENTS
from tests.clients.field import CLIENTS

ROOT = Path(__file__).parents[2]
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openai1": ("openai",),
    "openai2": ("openai",),
    "litellm": ("litellm",),
    "litellm_proxy": ("litellm",),
    "langchain": ("langchain-openai",),
    "llama_index": ("llama-index-llms-openai-like",),
    "pydantic_ai": ("pydantic-ai-slim",),
    "instructor": ("instructor",),
    "openai_agents": ("openai-agents",),
    "smolagents": ("smolagents",),
    "dspy": ("dspy",),
    "semantic_kernel": ("semantic-kernel",),
    "pipecat": ("pipecat-ai",),
    "livekit": ("livekit-agents", "livekit-plugins-openai"),
    "open_webui": ("open-webui",),
    "aiperf": ("aiperf",),
    "guidellm": ("guidellm",),
    "lm_eval": ("lm-eval",),
    "node": ("openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"),
}
"""What each environment is made for."""


def test_the_table_has_the_versions_that_run() -> None:
    table = (ROOT / "docs" / "use" / "clients.md").read_text()
    assert {client.requirements for client in CLIENTS} == {*PACKAGES, None}
    for requirements, packages in PACKAGES.items():
        versions = pinned(requirements)
        assert all(versions[package] in table for package in packages), requirements
    pyproject = (ROOT / "pyproject.toml").read_text()
    for package in ("openai", "vllm"):
        (ours,) = re.findall(rf'"{package}==([\d.]+)"', pyproject)
        assert ours in table, package


def pinned(requirements: str) -> dict[str, str]:
    if requirements == "node":
        return json.loads((REQUIREMENTS / "node" / "package.json").read_text())["dependencies"]
    lines = (REQUIREMENTS / f"{requirements}.txt").read_text().splitlines()
    return dict(re.fullmatch(r"([\w.\[\]-]+)==([^ ;]+).*", line).groups() for line in lines)
