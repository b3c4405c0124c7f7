"""What is in JSON, or a template's arguments, however deep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def all_strings(node: Any) -> Iterator[str]:
    """All strings in it, keys among them."""
    nodes = [node]
    while nodes:
        found = nodes.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            nodes += [*found, *found.values()]
        elif isinstance(found, Sequence):
            nodes += found
