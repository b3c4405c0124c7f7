"""The table of docs/use/api.md that names the fields which are ignored."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "use" / "api.md"


def ignored_fields(place: str) -> frozenset[str]:
    """Those of the rows whose first cell lists `place`."""
    _, behind = PAGE.read_text().split("\n| in | ignored |\n|---|---|\n")
    rows = [re.fullmatch(r"\| (.+?) \| (.+) \|", line) for line in behind.split("\n\n")[0].splitlines()]
    said = [row[2] for row in rows if row is not None and place in row[1].split(", ")]
    return frozenset(re.findall(r"`(\w+)`", " ".join(said)))
