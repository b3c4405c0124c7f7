"""`python -m tests.chaos`: clients ask while processes end; exit code 1 if an answer was lost or anything is left."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.soak import Plan, soak


def main() -> int:
    plan, files = asked(sys.argv[1:])
    report = soak(plan, files.log)
    print(*report.lines(), sep="\n")
    if files.report is not None:
        files.report.write_text(json.dumps(report.as_json(), indent=1))
    return 0 if report.is_good else 1


@dataclass(frozen=True, slots=True)
class Files:
    """What a soak leaves: its report as JSON, and all that the application printed."""

    report: Path | None = None
    log: Path | None = None


def asked(arguments: Sequence[str]) -> tuple[Plan, Files]:
    """What the command line asks for. Ends the process where it asks for what cannot be."""
    usual = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--clients", type=int, default=usual.clients)
    parser.add_argument("--every", type=float, default=usual.every_s, metavar="S", help="seconds between two breaks")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--config", type=Path, help="a stage configuration to serve on one node, as on a card")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="with --config: in the place of its model")
    parser.add_argument(
        "--cards-of-a-node", type=int, default=0, metavar="N", help="with --config: two nodes of so many"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the report as JSON")
    parser.add_argument("--log", type=Path, metavar="FILE", help="all that the application printed")
    said = parser.parse_args(arguments)
    if said.config is None and (said.checkpoint is not None or said.cards_of_a_node):
        parser.error("--checkpoint and --cards-of-a-node are for a configuration: name one with --config")
    nodes = said.cards_of_a_node
    plan = Plan(said.seconds, said.clients, said.every, said.seed, said.config, said.checkpoint, nodes)
    return plan, Files(said.out, said.log)


if __name__ == "__main__":
    sys.exit(main())
