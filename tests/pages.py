"""The pages that users read, and their fenced blocks: what each block is, so that a test takes it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
)
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `kind` says what takes it."""

    page: str
    line: int
    language: str
    text: str

    @property
    def kinds(self) -> list[str]:
        return [name for name, is_one in KINDS.items() if is_one(self)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _yaml_has(block: Block, *keys: str) -> bool:
    if block.language != "yaml":
        return False
    loaded: Any = yaml.safe_load(block.text)
    return any(key in loaded for key in keys)


_OF_OTHERS = ("scrape_configs", "applications")
KINDS: Mapping[str, Callable[[Block], bool]] = {
    "commands": lambda block: block.language == "bash",
    "openai": lambda block: block.language == "python" and "OpenAI(" in block.text,
    "socket": lambda block: block.language == "python" and "websockets" in block.text,
    "handle": lambda block: block.language == "python" and "get_app_handle(" in block.text,
    "offline": lambda block: block.language == "python" and "OmniLLM() as" in block.text,
    "batch": lambda block: block.language == "python" and "omni_cluster.batch" in block.text,
    "configuration": lambda block: block.language == "yaml" and not _yaml_has(block, *_OF_OTHERS),
    "applications": lambda block: _yaml_has(block, "applications"),
    "prometheus": lambda block: _yaml_has(block, "scrape_configs"),
    "error": lambda block: block.language == "json" and block.text.startswith('{"error"'),
    "message": lambda block: block.language == "json" and block.text.startswith('{"role"'),
    "fields": lambda block: block.language == "json" and not re.match(r'\{"(error|role)"', block.text),
    "entry point": lambda block: block.language == "toml",
    "picture": lambda block: block.language == "text" and block.text.strip().startswith("client\n"),
    "query": lambda block: block.language == "text" and "quantile(" in block.text,
    "log": lambda block: block.language == "text" and block.text.startswith("request "),
    "refusal": lambda block: block.language == "text" and "does not fit on" in block.text,
}
"""What a block is. Each kind has a test that calls `blocks_of` with its name."""


def blocks_in(page: str, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], textwrap.dedent(found[2]))


def all_blocks() -> Iterator[Block]:
    for path in PAGES:
        yield from blocks_in(str(path.relative_to(ROOT)), path.read_text())


def blocks_of(kind: str) -> list[Block]:
    return [block for block in all_blocks() if KINDS[kind](block)]


def section(page: str, title: str) -> list[Block]:
    """The blocks below a heading of a page, up to the next one of its level."""
    text = (ROOT / page).read_text()
    assert f"\n## {title}\n" in text, f"{page} has no {title}"
    return list(blocks_in(page, text.split(f"\n## {title}\n")[1].split("\n## ")[0]))
