"""`python -m tests.chaos.overload`: asks a server ten times what it can serve, and says what those get that it takes.

The server has few places, `limits.max_ongoing_requests`, and no queue. A host's speed decides what is printed: no test
asserts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from omni_cluster.bench.http_client import http_client
from omni_cluster.bench.load import Load, closed_loop, open_loop, poisson_arrivals, poisson_count
from omni_cluster.bench.record import Ask, RequestRecord

LOAD = Load(prompt_tokens=20, text_tokens=16, codec_tokens=64)
REQUESTS_ALONE, ROUNDS = 40, 12
TIMES = 10
TIMEOUT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.overload", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--places", type=int, required=True, help="limits.max_ongoing_requests of the server")
    parser.add_argument("--seconds", type=float, default=30.0, help="of ten times the capacity")
    asked = parser.parse_args()
    print(json.dumps(asyncio.run(measured(asked.url, asked.places, asked.seconds)), indent=1))
    return 0


async def measured(url: str, places: int, seconds: float) -> dict[str, Any]:
    """First sound of one client alone, the requests a second of `places` clients, and what ten times as many get."""
    async with http_client(url, LOAD, TIMEOUT_S) as client:
        await closed_loop(client.ask, range(places), places)
        alone = await closed_loop(client.ask, range(1000, 1000 + REQUESTS_ALONE), 1)
        rate_per_s, full = await _capacity(client.ask, places)
        count = poisson_count(TIMES * rate_per_s, seconds, 0)
        arrivals_s = poisson_arrivals(TIMES * rate_per_s, count, 0)
        flood = await open_loop(client.ask, range(3000, 3000 + count), arrivals_s)
    taken, refused = [each for each in flood if not each.error], [each for each in flood if each.error]
    return {
        "places": places,
        "first sound alone, s": _percentiles(_first_sounds_s(alone)),
        "first sound with all places taken, s": _percentiles(_first_sounds_s(full)),
        "capacity, requests/s": round(rate_per_s, 2),
        "sent, requests/s": round(TIMES * rate_per_s, 2),
        "taken": len(taken),
        "first sound of the taken, s": _percentiles(_first_sounds_s(taken)),
        "refused": len(refused),
        "until refused, s": _percentiles([each.total_s for each in refused]),
        "why refused": sorted({str(each.error) for each in refused})[:4],
    }


async def _capacity(ask: Ask, places: int) -> tuple[float, list[RequestRecord]]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    records = await closed_loop(ask, range(2000, 2000 + ROUNDS * places), places)
    return len(records) / (loop.time() - began_s), records


def _first_sounds_s(records: Sequence[RequestRecord]) -> list[float]:
    return [each.audio[0].at_s for each in records if each.audio]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 99)} if values else {}


if __name__ == "__main__":
    sys.exit(main())
