"""`python -m tests.chaos`: clients ask while processes end; exit code 1 if an answer was lost or anything is left."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.soak import Plan, soak


def main() -> int:
    plan, out = asked(sys.argv[1:])
    report = soak(plan)
    print(*report.lines(), sep="\n")
    if out is not None:
        out.write_text(json.dumps(report.as_json(), indent=1))
    return 0 if report.is_good else 1


def asked(arguments: Sequence[str]) -> tuple[Plan, Path | None]:
    """What the command line asks for, and the file of the report."""
    usual = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--clients", type=int, default=usual.clients)
    parser.add_argument("--every", type=float, default=usual.every_s, metavar="S", help="seconds between two breaks")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--out", type=Path, help="the report as JSON")
    said = parser.parse_args(arguments)
    return Plan(said.seconds, said.clients, said.every, said.seed), said.out


if __name__ == "__main__":
    sys.exit(main())
