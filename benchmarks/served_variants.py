"""The same load on one server after another, each with a variant of a configuration.

    python -m benchmarks.served_variants CONFIG --out FOLDER [--model FOLDER] [--cells 1 16 3/s 32c] [--seconds 30]
        --variant shipped --variant talker-low talker.card_priority=low code2wav.options.max_streams=32

A change is PATH=VALUE, the value as YAML; a stage goes by its name. Cells: `16`, bursts of so many at once; `3/s`,
Poisson arrivals for `--seconds`; `32c`, so many clients, each of which asks again when it has its answer. FOLDER gets
a folder a variant, with its configuration and `omni-cluster bench`'s results, and a table of all. Other options go to
`omni-cluster bench`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.result import FILE_NAME, Cell, read_result
from omni_cluster.cluster.local import LocalCluster
from training.changes import variant_of


def bench_arguments(cell: str, seconds: float) -> list[str]:
    """Of `omni-cluster bench` for the cell."""
    if cell.endswith("/s"):
        return ["--rate", cell.removesuffix("/s"), "--seconds", str(seconds)]
    if cell.endswith("c"):
        clients = int(cell.removesuffix("c"))
        return ["--concurrency", str(clients), "--requests", str(4 * clients)]
    count = int(cell)
    return ["--burst", "--concurrency", cell, "--requests", str(max(8, 2 * count))]


def measured(url: str, cells: Sequence[str], seconds: float, out: Path, rest: Sequence[str]) -> Iterator[Cell]:
    for number, cell in enumerate(cells):
        folder = out / f"{number}-{cell.replace('/', '-')}"
        command = [sys.executable, "-m", "omni_cluster", "bench", "--url", url, "--out", str(folder)]
        subprocess.run([*command, *bench_arguments(cell, seconds), *rest], check=True, stdout=subprocess.DEVNULL)
        yield from read_result(folder / FILE_NAME).cells


def line(variant: str, cell: Cell) -> str:
    columns = [
        variant,
        cell.name,
        f"{cell.requests_per_s:.2f}",
        str(cell.errors),
        _figure(cell, "first_text_s", "p50", "p95"),
        _figure(cell, "first_audio_s", "p50", "p95"),
        "-" if cell.gapless_share is None else f"{100 * cell.gapless_share:.0f} %",
        _figure(cell, "stall_s", "p50", "p95", "p99"),
        _figure(cell, "jct_s", "p50"),
    ]
    return "| " + " | ".join(columns) + " |"


def _figure(cell: Cell, name: str, *percents: str) -> str:
    of = cell.figures.get(name)
    return "-" if of is None else " / ".join(f"{getattr(of, percent):.3f}" for percent in percents)


HEAD = (
    "| variant | load | requests/s | failed | first text p50 / p95 | first audio p50 / p95 | no gap | "
    "stall p50 / p95 / p99 | whole answer p50 |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a checkpoint in the place of the configuration's")
    parser.add_argument("--variant", nargs="+", action="append", required=True, metavar=("NAME", "CHANGE"))
    parser.add_argument("--cells", nargs="+", default=["1", "16", "3/s", "5/s"])
    parser.add_argument("--seconds", type=float, default=30)
    options, rest = parser.parse_known_args()
    lines = []
    base = yaml.safe_load(options.config.read_text())
    try:
        variants = [variant_of(*words) for words in options.variant]
        configs = [variant.of(base) for variant in variants]
    except BenchError as error:
        sys.exit(str(error))
    for variant, config in zip(variants, configs, strict=True):
        folder = options.out / variant.name
        folder.mkdir(parents=True)
        config |= {"model": options.model} if options.model else {}
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        began_s = time.monotonic()
        with LocalCluster(folder / "config.yaml") as cluster:
            cluster.wait_ready()
            print(f"{variant.name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)
            for cell in measured(cluster.base_url, options.cells, options.seconds, folder, rest):
                lines.append(line(variant.name, cell))
                print(lines[-1], flush=True)
    table = "\n".join([HEAD, "|---" * 9 + "|", *lines])
    (options.out / "table.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
