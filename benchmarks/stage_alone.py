"""One engine alone, a thinker or a talker fed with random rows: milliseconds a token by requests at once.

    python benchmarks/stage_alone.py thinker|talker CONFIG.yaml OUT.json [--requests 1 16 32 64] [--tokens 512]

CONFIG.yaml as for `omni-cluster bench --offline`; the one stage is started, and nothing else. The first round warms up
and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_cluster.bench.machine import this_machine
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import BoundPipeline, bind, make_stage
from omni_cluster.engine.fitting import fit_process
from omni_cluster.models.qwen2_5_omni.thinker import ROWS
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows

PROMPT_ROWS, TEXT_ROWS = 100, 64


PROMPT_WORDS = "seven streams met below the mill, "  # eight tokens or so


async def rows_of(request: int, width: int) -> AsyncIterator[StageChunk]:
    """What a thinker would say of a prompt and an answer, all at once; another sound for each request."""
    generator = torch.Generator().manual_seed(request)
    rows = 0.02 * torch.randn(PROMPT_ROWS + TEXT_ROWS, width, generator=generator)
    positions = np.tile(np.arange(PROMPT_ROWS), (3, 1))
    yield StageChunk(
        token_ids=tuple(range(TEXT_ROWS)), rows=Rows.of(ROWS, 0, rows.bfloat16(), positions), finish_reason="length"
    )


async def token_ms(stage: Stage, name: str, request: int, tokens: int, width: int) -> float:
    """Milliseconds a token of one request, from its first chunk to its last."""
    asked = OmniRequest(
        f"alone-{request}",
        f"Story {request}: " + PROMPT_WORDS * 12,
        sampling={name: {"min_tokens": tokens, "max_tokens": tokens}},
        seed=request,
    )
    upstream = rows_of(request, width) if name == "talker" else None
    arrivals: list[tuple[float, int]] = []
    async for chunk in stage.generate(asked, upstream):
        arrivals.append((time.perf_counter(), chunk.token_end))
    (first_s, first_end), (last_s, last_end) = arrivals[0], arrivals[-1]
    return 1e3 * (last_s - first_s) / (last_end - first_end)


async def measured(bound: BoundPipeline, name: str, levels: list[int], tokens: int) -> dict[str, float]:
    width = int(json.loads((bound.folder / "config.json").read_text())["talker_config"]["embedding_size"])
    stage = make_stage(next(s for s in bound.config.stages if s.model_stage == name), bound)
    await stage.start()
    number, medians = 0, {}
    try:
        for level in [levels[0], *levels]:
            each = await asyncio.gather(*(token_ms(stage, name, number + i, tokens, width) for i in range(level)))
            number += level
            medians[str(level)] = round(statistics.median(each), 4)
            print(f"{level} at once: {medians[str(level)]:.3f} ms a token", flush=True)
    finally:
        await stage.shutdown()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["thinker", "talker"])
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    bound = fit_process(bind(load_config(options.config, known_families=known_families())))
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": dataclasses.asdict(this_machine("the engine")),
        "stage": options.stage,
        "tokens": options.tokens,
        "ms_a_token_by_requests_at_once": asyncio.run(measured(bound, options.stage, options.requests, options.tokens)),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
