"""`python -m tests.fuzz`: many mutated inputs against what takes them; exit code 1 where one broke or outgrew it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.fuzz.driver import Findings, Plan, fuzz, lines, run_one


def main() -> int:
    from tests.fuzz.kinds import KINDS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="this input alone, in this process")
    asked = parser.parse_args()
    plan = Plan(asked.seed, asked.kinds)
    if asked.only is not None:
        return _again(asked.only, plan)
    began_s = time.monotonic()
    findings = fuzz(asked.count, plan, asked.workers)
    print(*lines(findings), sep="\n")
    print(f"{findings.count / (time.monotonic() - began_s):,.0f} inputs a second, seed {asked.seed}")
    is_good = not findings.crashes and findings.count == asked.count and findings.is_within_bounds
    return 0 if is_good else 1


def _again(index: int, plan: Plan) -> int:
    print(plan.input(index)[:2000])
    findings = Findings()
    run_one(index, plan, findings)
    print(*findings.crashes, *lines(findings), sep="\n")
    return 1 if findings.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
