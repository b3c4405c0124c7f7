"""What a run comes to, as it is written to result.json and read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from omni_cluster.bench.capacity import Capacity
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import Machine
from omni_cluster.bench.mix import Lengths
from omni_cluster.bench.record import RequestRecord

Arrivals = Literal["closed", "burst", "open"]
FILE_NAME = "result.json"
REQUESTS_NAME = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of all requests that succeeded. `p95`: None in an older result."""

    p50: float
    p90: float
    p99: float
    p95: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What one load came to: at one concurrency, or at one rate of requests a second.

    `figures` and `stages` are of the requests that succeeded, and empty when none did; names that end in `_s` are
    seconds. `first_error` is the sentence of the first request that failed. `gapless_share` of all requests brought
    sound and never let the player run dry; one that failed did not. None in an older result.
    """

    arrivals: Arrivals
    level: float
    requests: int
    errors: int
    wall_s: float
    requests_per_s: float
    audio_s_per_s: float
    figures: Mapping[str, Percentiles] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, Percentiles]] = field(default_factory=dict)
    first_error: str | None = None
    gapless_share: float | None = None

    @property
    def name(self) -> str:
        return f"open {self.level:g}/s" if self.arrivals == "open" else f"{self.arrivals} {self.level:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. `target` is the address of the server, or "offline"; `capacity` is what a search found."""

    date: str
    command: str
    target: str
    model: str
    machine: Machine
    load: Load
    cells: tuple[Cell, ...]
    capacity: Capacity | None = None


def make_folder(folder: Path) -> None:
    """Of the results. Raises BenchError for one that has some already, or cannot be made."""
    if (folder / FILE_NAME).exists():
        raise BenchError(f"--out is {folder}, which holds the result of an earlier run; name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out is {folder}, which cannot be made ({error.strerror}); name another folder.") from None


def write_result(result: Result, folder: Path) -> Path:
    path = folder / FILE_NAME
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read_result(path: Path) -> Result:
    """Raises BenchError for a file that cannot be read, or is no result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"{path} cannot be read ({error.strerror}); name a {FILE_NAME} of an earlier run.") from None
    except msgspec.MsgspecError as error:
        raise BenchError(f"{path} is no result of this command ({error}); name a {FILE_NAME}.") from None


class _Line(msgspec.Struct):
    cell: str
    asked: Lengths
    request: RequestRecord


def write_requests(cell: str, records: Sequence[RequestRecord], load: Load, folder: Path) -> None:
    """Adds a line a request: what was asked, and the time of every arrival, for other figures than ours."""
    lines = [_Line(cell, load.lengths(record.number), record) for record in records]
    with (folder / REQUESTS_NAME).open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
