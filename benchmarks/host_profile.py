"""Where the host's time goes: CPU of each process while a server is under load, and in which functions.

    python -m benchmarks.host_profile CONFIG --out FOLDER [--model FOLDER] [--cells 1 15/s 20/s] [--seconds 30]
        [--profiled 15/s] [--py-spy py-spy] [--port 8000]

Starts the application and puts the cells on it, written as in `benchmarks.served_variants`. Of each cell FOLDER gets
`omni-cluster bench`'s results and `cpu.json`: the CPU time of each process from the cell's begin to its end. Cells of
`--profiled` come last, and py-spy looks into each process that is busy: FOLDER gets a file of stacks a process, and
`functions.txt`, the functions in which they were. py-spy stops a process for each look, so those cells are slower.
Other options go to `omni-cluster bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.served_variants import HEAD, bench_arguments, line
from omni_cluster.bench.result import FILE_NAME, Cell, read_result
from omni_cluster.cluster.local import LocalCluster

BEFORE_PROFILE_S = 10.0  # the bench imports its libraries, and the first requests' answers are on their way
PROFILE_S = 15.0
LOOKS_PER_S = 50
BUSY_CORES = 0.03  # of a core: py-spy looks into no process that is less busy
LEAST_SHARE = 0.003  # of a core: what used less is left out of the table
NOT_SERVER = ("client", "this benchmark")
FUNCTIONS = 30  # in the table of a process
REPLICA = re.compile(r"ServeReplica:default:(\w+)")
# Of a replica's child, and what it is called.
CHILDREN = (("EngineCore", "engine core"), ("Worker", "worker"), ("watchdog", "watchdog"), ("decoder", "decoder"))
# What a process's command line has in it, and what it is called; the first that fits.
ROLES = (
    ("ProxyActor", "proxy"),
    ("ServeController", "controller"),
    ("omni_cluster bench", "client"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "gcs"),
    ("ray::", "other actors"),
    ("ray", "other of Ray"),
)


@dataclass(frozen=True)
class Used:
    """CPU seconds of one process."""

    pid: int
    role: str
    cpu_s: float


def role_of(lines: Sequence[str]) -> str:
    """What a process is, by its command line, which is the first, and those of its parents behind it."""
    for depth, words in enumerate(lines):
        if replica := REPLICA.search(words):
            part = "replica" if depth == 0 else _first(CHILDREN, lines[0], "child")
            return f"{replica[1]} {part}"
    return _first(ROLES, lines[0], "other")


def _first(named: Sequence[tuple[str, str]], words: str, otherwise: str) -> str:
    return next((name for sign, name in named if sign in words), otherwise)


def used(root: psutil.Process) -> dict[int, Used]:
    """By pid, of `root` and all beneath it, up to now."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times, role = process.cpu_times(), role_of(list(_lines(process, root)))
            found[process.pid] = Used(process.pid, role, times.user + times.system)
    return found


def _lines(process: psutil.Process, root: psutil.Process) -> Iterator[str]:
    if process.pid == root.pid:
        yield "this benchmark"
        return
    yield " ".join(process.cmdline())
    for parent in process.parents():
        if parent.pid == root.pid:
            return
        yield " ".join(parent.cmdline())


def between(before: Mapping[int, Used], after: Mapping[int, Used]) -> list[Used]:
    """What each process used meanwhile, the most first. One that ended meanwhile is left out."""
    seconds = {pid: now.cpu_s - (before[pid].cpu_s if pid in before else 0.0) for pid, now in after.items()}
    spent = [Used(pid, now.role, round(seconds[pid], 2)) for pid, now in after.items()]
    return sorted(spent, key=lambda one: -one.cpu_s)


def thread_seconds(pid: int) -> Counter[str]:
    """CPU seconds of a process's threads up to now, those of one name together."""
    seconds: Counter[str] = Counter()
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        for thread in psutil.Process(pid).threads():
            name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()
            seconds[re.sub(r"\d+$", "", name)] += thread.user_time + thread.system_time  # type: ignore[assignment]
    return seconds


@dataclass(frozen=True)
class Function:
    """How many looks found it at work itself (`own`), and anywhere on the stack (`total`)."""

    name: str
    own: int
    total: int


def functions(stacks: Iterable[str]) -> list[Function]:
    """Of py-spy's raw lines, `outer;inner 12`, the one that works most first. A recursion counts once a stack."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for stack in stacks:
        frames, _, count = stack.rpartition(" ")
        names = frames.split(";")
        own[names[-1]] += int(count)
        total.update(dict.fromkeys(names, int(count)))
    found = [Function(name, own[name], looks) for name, looks in total.items()]
    return sorted(found, key=lambda one: (-one.own, -one.total, one.name))


def function_table(role: str, found: Sequence[Function], looks: int) -> list[str]:
    """Shares of the looks at which the process was found: all of them are all of its CPU time."""
    seen = sum(one.own for one in found)
    by_total = sorted(found, key=lambda one: -one.total)[:FUNCTIONS]
    head = [f"## {role}: at work in {seen} of {looks} looks (threads add up); own, with what it calls, function"]
    rows = [f"{100 * f.own / seen:5.1f} % {100 * f.total / seen:5.1f} %  {f.name}" for f in found[:FUNCTIONS]]
    rows += ["  with what they call:"]
    rows += [f"{100 * f.own / seen:5.1f} % {100 * f.total / seen:5.1f} %  {f.name}" for f in by_total]
    return [*head, *rows, ""]


def cpu_table(spent: Sequence[Used], cell: Cell) -> list[str]:
    """Of each process: its role, cores it kept busy, CPU milliseconds a request and a piece of sound. All of the server
    are the first line."""
    requests = max(1, cell.requests - cell.errors)
    pieces = requests * (cell.figures["audio_chunks"].p50 if "audio_chunks" in cell.figures else 1)
    server = [one for one in spent if one.role not in NOT_SERVER and one.cpu_s > LEAST_SHARE * cell.wall_s]
    client = [one for one in spent if one.role == "client"]
    rows = [f"| process ({cell.name}, {requests} requests, {pieces:.0f} pieces) | cores | ms a request | ms a piece |"]
    rows.append("|---|---|---|---|")
    for one in [Used(0, "the server", sum(one.cpu_s for one in server)), *server, *client]:
        figures = one.cpu_s / cell.wall_s, 1000 * one.cpu_s / requests, 1000 * one.cpu_s / pieces
        rows.append(f"| {one.role} | {figures[0]:.2f} | {figures[1]:.1f} | {figures[2]:.2f} |")
    return rows


def _since(before: Counter[str], pid: int) -> dict[str, float]:
    now = thread_seconds(pid)
    return {name: round(now[name] - before[name], 2) for name, _ in now.most_common() if now[name] > before[name]}


class Profile:
    """py-spy at work on each busy process."""

    def __init__(self, root: psutil.Process, py_spy: str, folder: Path) -> None:
        self._root, self._py_spy, self._folder = root, py_spy, folder

    def record(self) -> None:
        """Takes `BEFORE_PROFILE_S` and `PROFILE_S`, and writes `functions.txt`, `stacks-*.txt` and `window.json`."""
        time.sleep(BEFORE_PROFILE_S)
        before = used(self._root)
        time.sleep(1)
        busy = [one for one in between(before, used(self._root)) if one.cpu_s > BUSY_CORES and self._has_python(one)]
        began_s, before = time.monotonic(), used(self._root)
        threads = {one.pid: thread_seconds(one.pid) for one in busy}
        looking = [(one, self._look(one)) for one in busy]
        for _, look in looking:
            look.wait()
        spent = between(before, used(self._root))
        window: dict[str, Any] = {
            "seconds": time.monotonic() - began_s,
            "used": [asdict(one) for one in spent if one.cpu_s > 0],
        }
        window["threads"] = {f"{one.role} {one.pid}": _since(threads[one.pid], one.pid) for one in busy}
        (self._folder / "window.json").write_text(json.dumps(window, indent=1))
        tables = [self._table(one) for one, _ in looking]
        (self._folder / "functions.txt").write_text("\n".join(row for table in tables for row in table))

    def _has_python(self, one: Used) -> bool:
        return one.role not in ("raylet", "gcs", "this benchmark")

    def _stacks(self, one: Used) -> Path:
        return self._folder / f"stacks-{one.role.replace(' ', '-')}-{one.pid}.txt"

    def _look(self, one: Used) -> subprocess.Popen[bytes]:
        options = ["--pid", str(one.pid), "--rate", str(LOOKS_PER_S), "--duration", str(round(PROFILE_S))]
        form = ["--format", "raw", "--function", "--output", str(self._stacks(one))]
        with self._stacks(one).with_suffix(".log").open("wb") as log:
            return subprocess.Popen([self._py_spy, "record", *options, *form], stdout=log, stderr=log)

    def _table(self, one: Used) -> list[str]:
        if not self._stacks(one).exists():
            return [f"## {one.role}: py-spy wrote nothing", ""]
        found = functions(self._stacks(one).read_text().splitlines())
        return function_table(f"{one.role} {one.pid}", found, round(PROFILE_S * LOOKS_PER_S)) if found else []


def measured(
    url: str, cell: str, seed: int, options: argparse.Namespace, rest: Sequence[str], *, profiled: bool
) -> Cell:
    """Runs the cell and prints its figures; `cpu.json` and `cpu.md` lie beside the bench's result."""
    folder = options.out / f"{cell.replace('/', '-')}{'-profiled' if profiled else ''}"
    command = [sys.executable, "-m", "omni_cluster", "bench", "--url", url, "--out", str(folder), "--seed", str(seed)]
    root = psutil.Process()
    before, after = used(root), {}
    bench = subprocess.Popen([*command, *bench_arguments(cell, options.seconds), *rest], stdout=subprocess.DEVNULL)
    if profiled:
        folder.mkdir(parents=True, exist_ok=True)
        Profile(root, options.py_spy, folder).record()
    while bench.poll() is None:
        after = used(root)  # the client's time is known only while it runs
        time.sleep(0.5)
    (result,) = read_result(folder / FILE_NAME).cells
    spent = between(before, {**after, **used(root)})
    (folder / "cpu.json").write_text(json.dumps([asdict(one) for one in spent], indent=1))
    rows = [line(options.out.name, result), *cpu_table(spent, result)]
    (folder / "cpu.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a checkpoint in the place of the configuration's")
    parser.add_argument("--cells", nargs="*", default=["1", "15/s", "20/s"])
    parser.add_argument("--profiled", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--py-spy", default="py-spy")
    parser.add_argument("--port", type=int, default=8000)
    options, rest = parser.parse_known_args()
    options.out.mkdir(parents=True)
    config = yaml.safe_load(options.config.read_text()) | ({"model": options.model} if options.model else {})
    (options.out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    began_s = time.monotonic()
    with LocalCluster(options.out / "config.yaml", options.port) as cluster:
        cluster.wait_ready()
        print(f"{options.out.name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)
        todo = [(cell, False) for cell in options.cells] + [(cell, True) for cell in options.profiled]
        cells = [
            measured(cluster.base_url, cell, seed, options, rest, profiled=profiled)
            for seed, (cell, profiled) in enumerate(todo)  # of its own: a cell finds no prompt of another's in a cache
        ]
    table = "\n".join([HEAD, "|---" * 9 + "|", *(line(options.out.name, cell) for cell in cells)])
    (options.out / "table.md").write_text(table + "\n")


if __name__ == "__main__":
    main()
