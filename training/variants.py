"""Serves variants of a configuration by turns, asks each the same questions, and compares what is right.

    python -m training.variants --base stage_configs/qwen2_5_omni_toy.yaml --variants training/variants_cpu.yaml \
        --questions 90 --clients 3 --out variants.json

A variant is a name and what it changes, by paths: `thinker.engine_args.dtype` is of that stage, `limits.max_wait_s` of
the whole file. `asked.stream: false` asks for answers that are not streamed. `--variant NAME PATH=VALUE ...` adds one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.table import Table

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.table import wide_console
from omni_cluster.cli_values import count, whole
from omni_cluster.config.loader import DEFAULT_CONFIG, load_config
from omni_cluster.engine.build import check_stages
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import OmniError
from training.asking import Question, Way
from training.changes import Variant, read_variants, variant_of
from training.exam import Exam, answered, percent, written
from training.local_server import serving
from training.marking import Understand, marked, report, understood
from training.pairs import Pairs, Taken, paired
from training.recogniser import NoRecogniser, Recogniser
from training.saying import SPEAKERS
from training.speech import NoEspeak

BASE: Final = "base"
ASKED_STREAM: Final = "asked.stream"
"""Not of the configuration: whether answers are streamed."""


def configuration(variant: Variant, base: Mapping[str, Any]) -> dict[str, Any]:
    """Raises BenchError for a path that leads into a value."""
    changes = {path: value for path, value in variant.changes.items() if path != ASKED_STREAM}
    return Variant(variant.name, changes).of(base)


@dataclass(frozen=True, slots=True)
class Result:
    """`figures`: of the exam. `pairs`: beside the base; None of the base itself. `error`: why there are none."""

    variant: Variant
    figures: Mapping[str, Any] | None = None
    pairs: Pairs | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"name": self.variant.name, "changes": dict(self.variant.changes)}
        if self.error is not None:
            return told | {"error": self.error}
        return told | {"pairs": self.pairs and self.pairs.as_json(), "figures": self.figures}


class Comparison:
    """Of variants with a base, whose answers come first: all get the same questions."""

    def __init__(self, base: Mapping[str, Any], exam: Exam, understand: Understand, folder: Path):
        """`folder`: of configurations and of what servers print."""
        self._base, self._exam, self._understand, self._folder = base, exam, understand, folder
        self._asked: dict[Way, list[Question]] = exam.asked()
        self._of_base: Taken | None = None

    def configurations(self, variants: Sequence[Variant]) -> list[Path]:
        """Their files, all checked before one is served. Raises ConfigError and BenchError."""
        files = [self._folder / f"{number}.yaml" for number in range(len(variants))]
        for file, variant in zip(files, variants, strict=True):
            file.write_text(yaml.safe_dump(configuration(variant, self._base), sort_keys=False))
            check_stages(load_config(file, known_families=known_families()))
        return files

    def result(self, variant: Variant, config: Path) -> Result:
        """What is served badly is a result too, but of the base. Raises BenchError for that."""
        try:
            taken = self._taken(variant, config)
        except BenchError as error:
            if self._of_base is None:
                raise
            return Result(variant, error=str(error))
        figures = report(taken[1])
        if self._of_base is None:
            self._of_base = taken
            return Result(variant, figures)
        return Result(variant, figures, paired(self._of_base, taken))

    def _taken(self, variant: Variant, config: Path) -> Taken:
        with serving(config, config.with_suffix(".log")) as url:
            exam = replace(self._exam, url=url, streams=bool(variant.changes.get(ASKED_STREAM, True)))
            _, answers = asyncio.run(answered(exam, self._asked))
        of_all = [answer for of_way in answers.values() for answer in of_way]
        return of_all, marked(of_all, self._understand)


# ------------------------------------------------------------------ the table

COLUMNS: Final = (
    "questions", "lost", "text right", "spoken right", "text - / +", "spoken - / +", "chance", "same text",
    "same words", "same length, dB", "first sound", "RTF",
)  # fmt: skip


def table(results: Sequence[Result]) -> Table:
    made = Table("variant", title="- / +: right in the base alone / in the variant alone; seconds: p50 / p95")
    for name in COLUMNS:
        made.add_column(name, justify="right", no_wrap=True)
    for result in results:
        made.add_row(result.variant.name, *_cells(result))
    return made


def _cells(result: Result) -> Iterator[str]:
    if result.figures is None:
        yield str(result.error)
        return
    of, pairs = result.figures, result.pairs
    yield from (str(of["questions"]), str(of["lost"]), percent(of["text"]), percent(of["spoken"]))
    yield from [""] * 6 if pairs is None else _of_pairs(pairs)
    for name in ("first_audio_s", "rtf"):
        times = of["times"].get(name)
        yield f"{times['p50']:.2f} / {times['p95']:.2f}" if times else "-"


def _of_pairs(pairs: Pairs) -> Iterator[str]:
    yield from (f"{each.lost} / {each.gained}" for each in (pairs.text, pairs.spoken))
    yield f"{pairs.spoken.chance:.2f}"
    yield from map(str, (pairs.same_text, pairs.same_words))
    yield f"{pairs.same_length}" + ("" if pairs.like_db is None else f", {pairs.like_db:.0f} dB")


# ------------------------------------------------------------------ the command


def compared(given: argparse.Namespace, console: Console) -> list[Result]:
    """All results; each is written and told once it is there. Raises OmniError, NoEspeak and NoRecogniser."""
    Recogniser()  # what is missing is told before a server is started
    named = [variant for file in given.variants for variant in read_variants(file)]
    variants = [Variant(BASE), *named, *(variant_of(*words) for words in given.variant)]
    ways = tuple(Way) if given.by == "all" else (Way(given.by),)
    exam = Exam("", ways, given.questions, tuple(given.voices.split(",")), given.seed, given.clients)
    folder = Path(tempfile.mkdtemp(prefix="variants-"))
    understand = partial(understood, processes=given.processes)
    load_config(given.base, known_families=known_families())  # tells what is wrong with it
    base = variant_of(BASE, *given.set).of(yaml.safe_load(given.base.read_text()))
    comparison = Comparison(base, exam, understand, folder)
    results: list[Result] = []
    for variant, config in zip(variants, comparison.configurations(variants), strict=True):
        results.append(comparison.result(variant, config))
        head = {name: value for name, value in asdict(exam).items() if name not in ("url", "streams")}
        told = {"base": str(given.base), "set": given.set, **head, "variants": [result.as_json() for result in results]}
        written(told, "training.variants", given.out)
        console.print(table(results[-1:]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares variants of a configuration by what is right in their answers."
    )
    parser.add_argument("--base", type=Path, default=DEFAULT_CONFIG, help="a stage configuration of the toy")
    parser.add_argument("--set", nargs="+", default=[], metavar="PATH=VALUE", help="changes the base itself")
    parser.add_argument("--variants", type=Path, action="append", default=[], help="a YAML file of names and changes")
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar=("NAME", "PATH=VALUE"))
    parser.add_argument("--questions", type=count, default=90, help="of each way of asking")
    parser.add_argument("--by", choices=[*Way, "all"], default="text")
    parser.add_argument("--voices", default=",".join(SPEAKERS), help="of the answers, by turns")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--clients", type=count, default=3, help="so many questions are asked at once")
    parser.add_argument("--processes", type=count, default=os.cpu_count(), help="that understand the answers")
    parser.add_argument("--out", type=Path, help="a JSON file with all figures and what went wrong")
    console = wide_console()
    # As Ctrl-C does, which ends the server that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM."))
    try:
        results = compared(parser.parse_args(), console)
    except (OmniError, NoEspeak, NoRecogniser) as error:
        sys.exit(str(error))
    console.print(table(results))


if __name__ == "__main__":
    main()
