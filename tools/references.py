"""Writes the generated parts of the documentation: `python -m tools.references`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tools.configuration_reference import configuration_reference
from tools.metrics_reference import metrics_reference

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {"operate/configuration.md": configuration_reference, "operate/metrics.md": metrics_reference}
)
"""What makes the generated part of a page, by the page's path."""
MARK: Final = "<!-- Generated from here on: `make docs` writes it. -->\n"
"""The last line of a page that is written by hand."""


def whole_page(path: str) -> str:
    """The page as it should be. Raises ValueError for a page without the mark."""
    written = (DOCS / path).read_text(encoding="utf-8")
    end = written.index(MARK) + len(MARK)
    return f"{written[:end]}\n{PAGES[path]()}"


def write_pages() -> None:
    for path in PAGES:
        (DOCS / path).write_text(whole_page(path), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
