"""Spoken prompts over HTTP, one after another: seconds until the first text and the first sound.

    python -m benchmarks.spoken_prompts OUT.json [--url URL] [--seconds 2 10] [--requests 8]

Each prompt is noise of its own of the given length, so that no cache answers it; a text prompt of 100 words is asked
beside each, for comparison. The first of each kind is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import json
import shlex
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from omni_cluster.bench.http_client import HttpClient, first_model
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import this_machine
from omni_cluster.bench.record import RequestRecord
from omni_cluster.openai_api.audio import wav_bytes

RATE_HZ = 16_000


class SpokenClient(HttpClient):
    """Asks by sound of `seconds`, or by text where that is 0."""

    seconds = 0.0

    def body(self, number: int) -> dict[str, Any]:
        body = super().body(number)
        if self.seconds:
            sound = {"data": base64.b64encode(noise(self.seconds, number)).decode(), "format": "wav"}
            body["messages"] = [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]
        return body


def noise(seconds: float, seed: int) -> bytes:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE_HZ)) * 0.1
    return wav_bytes(samples.astype(np.float32), RATE_HZ)


async def measure(url: str, lengths_s: list[float], requests: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        client = SpokenClient(http, await first_model(http, url), Load())
        cells = []
        for seconds in [0.0, *lengths_s]:
            client.seconds = seconds
            records = [await client.ask(1000 * int(seconds) + number) for number in range(requests + 1)]
            cells.append(cell(seconds, records[1:]))
            print(json.dumps(cells[-1]))
        return cells


def cell(seconds: float, records: list[RequestRecord]) -> dict[str, Any]:
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    return {
        "prompt_s": seconds,
        "requests": len(records),
        "failed": len(errors),
        "first_failure": errors[0] if errors else None,
        "prompt_tokens": done[0].prompt_tokens if done else None,
        "first_text_s": quantiles([record.text_s[0] for record in done]),
        "first_audio_s": quantiles([record.audio[0].at_s for record in done]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 4), "max": round(max(values), 4)} if values else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--requests", type=int, default=8)
    asked = parser.parse_args()
    cells = asyncio.run(measure(asked.url, asked.seconds, asked.requests))
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.spoken_prompts", *sys.argv[1:]]),
        "machine": asdict(this_machine("client")),
        "cells": cells,
    }
    asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
