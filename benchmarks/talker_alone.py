"""The talker's engine alone, fed with random rows: milliseconds a code by requests at once.

    python benchmarks/talker_alone.py CONFIG.yaml OUT.json [--requests 1 16 32 64] [--codes 512]

CONFIG.yaml as for `omni-cluster bench --offline`; its talker is started, and nothing else. The first round warms up and
is not counted.
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

import torch

from omni_cluster.bench.machine import this_machine
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import BoundPipeline, bind, make_stage
from omni_cluster.engine.memory import fit_process
from omni_cluster.engine.stage import Stage
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.registry import known_families
from omni_cluster.outputs import StageChunk
from omni_cluster.payloads import RowsChunk

PROMPT_ROWS, TEXT_ROWS = 100, 64


async def rows_of(request: int, width: int) -> AsyncIterator[StageChunk]:
    """What a thinker would say of a prompt and an answer, all at once; another sound for each request."""
    generator = torch.Generator().manual_seed(request)
    rows = 0.02 * torch.randn(PROMPT_ROWS + TEXT_ROWS, width, generator=generator)
    positions = torch.arange(PROMPT_ROWS).expand(3, -1).contiguous()
    yield StageChunk(
        token_ids=tuple(range(TEXT_ROWS)), rows=RowsChunk(0, rows.bfloat16(), positions), finish_reason="length"
    )


async def code_ms(talker: Stage, request: int, codes: int, width: int) -> float:
    """Milliseconds a code of one request, from its first chunk to its last."""
    asked = OmniRequest(
        f"alone-{request}", "", sampling={"talker": {"min_tokens": codes, "max_tokens": codes}}, seed=request
    )
    arrivals: list[tuple[float, int]] = []
    async for chunk in talker.generate(asked, rows_of(request, width)):
        arrivals.append((time.perf_counter(), chunk.token_end))
    (first_s, first_end), (last_s, last_end) = arrivals[0], arrivals[-1]
    return 1e3 * (last_s - first_s) / (last_end - first_end)


async def measured(bound: BoundPipeline, levels: list[int], codes: int) -> dict[str, float]:
    width = int(json.loads((bound.folder / "config.json").read_text())["talker_config"]["embedding_size"])
    talker = make_stage(next(s for s in bound.config.stages if s.model_stage == "talker"), bound)
    await talker.start()
    number, medians = 0, {}
    try:
        for level in [levels[0], *levels]:
            each = await asyncio.gather(*(code_ms(talker, number + i, codes, width) for i in range(level)))
            number += level
            medians[str(level)] = round(statistics.median(each), 4)
            print(f"{level} at once: {medians[str(level)]:.3f} ms a code", flush=True)
    finally:
        await talker.shutdown()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--codes", type=int, default=512)
    options = parser.parse_args()
    bound = fit_process(bind(load_config(options.config, known_families=known_families())))
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": dataclasses.asdict(this_machine("the engine")),
        "codes": options.codes,
        "ms_a_code_by_requests_at_once": asyncio.run(measured(bound, options.requests, options.codes)),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
