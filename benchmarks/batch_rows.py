"""Rows a second of a batch with engines of its own, against `OmniLLM`, on the same rows in one run.

Starts of engines are not counted; both have answered one row before. `python -m benchmarks.batch_rows --rows 64`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
import ray.data

from omni_cluster.batch import BatchLimits, Engines, answer_rows
from omni_cluster.engine.omni_llm import OmniLLM, OmniPrompt

CPUS = 4
VOICE = "Chelsie"
SEED = 0
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What one way took for all rows, and their texts."""

    name: str
    took_s: float
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Timed(Engines):
    """Engines that write down when they were first asked, and when they last answered."""

    times: str

    @asynccontextmanager
    async def opened(self, limits: BatchLimits) -> AsyncIterator[httpx.AsyncClient]:
        async with super().opened(limits) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            await http.post("/v1/chat/completions", json={"model": model} | body_of(rows_of(1)[0]), timeout=None)
            http.event_hooks = {"request": [self._note], "response": [self._note]}
            yield http

    async def _note(self, message: httpx.Request | httpx.Response) -> None:
        request = message.request if isinstance(message, httpx.Response) else message
        if request.method == "POST":
            with open(self.times, "a") as file:
                print(time.time(), file=file)


def rows_of(count: int) -> list[Row]:
    questions = (f"Tell me of the number {i}, and of all that comes after it." for i in range(count))
    spoken = {"modalities": ["text", "audio"], "voice": VOICE, "seed": SEED}
    return [
        {"id": f"{i:04}", "messages": json.dumps([{"role": "user", "content": question}])} | spoken
        for i, question in enumerate(questions)
    ]


def body_of(row: Row) -> Row:
    return {"messages": json.loads(row["messages"]), "modalities": row["modalities"], "seed": row["seed"]}


def by_omni_llm(rows: Sequence[Row]) -> Run:
    with OmniLLM() as omni:
        prompts = [OmniPrompt(omni.render(json.loads(row["messages"]))) for row in rows]
        omni.generate(prompts[:1], voice=VOICE, use_tqdm=False)
        began_s = time.time()
        outputs = omni.generate(prompts, voice=VOICE, seed=SEED, use_tqdm=False)
        return Run("OmniLLM", time.time() - began_s, [output.text for output in outputs])


def by_batch(rows: Sequence[Row], limits: BatchLimits) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        asked = answer_rows(ray.data.from_items(list(rows)), Timed(times=str(times)), limits)
        answers = sorted(asked.take_all(), key=lambda answer: answer["id"])
        noted = [float(line) for line in times.read_text().splitlines()]
    failed = [answer["error"] for answer in answers if answer["error"]]
    if failed:
        raise SystemExit(f"{len(failed)} rows failed: {failed[0]}")
    return Run("omni_cluster.batch", max(noted) - min(noted), [answer["text"] for answer in answers])


def table(runs: Sequence[Run]) -> str:
    count, first = len(runs[0].texts), runs[0]
    lines = [
        f"| {run.name} | {run.took_s:.1f} | {count / run.took_s:.2f} | {first.took_s / run.took_s:.3f} | "
        f"{sum(a == b for a, b in zip(run.texts, first.texts, strict=True))} of {count} |"
        for run in runs
    ]
    head = ["| | s | rows/s | ratio | texts as the first |", "|---|---|---|---|---|"]
    return "\n".join(head + lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rows-at-once", type=int, default=32)
    options = parser.parse_args()
    rows = rows_of(options.rows)
    first = by_omni_llm(rows)
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    print(table([first, by_batch(rows, BatchLimits(rows_at_once=options.rows_at_once))]))


if __name__ == "__main__":
    main()
