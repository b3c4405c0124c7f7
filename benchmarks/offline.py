"""The engines alone, without Ray and HTTP: closed-loop load on `AsyncOmniLLM`, times as JSON.

    python -m benchmarks.offline --config stage_configs/qwen2_5_omni_one_gpu.yaml --model DIR --concurrency 1 16

Random weights at real sizes give real times. Lengths are fixed: every request has the same numbers of prompt tokens,
text tokens and codec tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from omni_cluster.config.loader import load_config
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.registry import known_families

SAMPLE_RATE_HZ = 24_000


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """Seconds since a request was sent, and the seconds of sound that it gave."""

    first_text_s: float
    last_text_s: float
    first_code_s: float
    last_code_s: float
    first_audio_s: float
    total_s: float
    audio_s: float


@dataclasses.dataclass(frozen=True)
class Load:
    prompt_words: int
    text_tokens: int
    codec_tokens: int


async def timed(omni: AsyncOmniLLM, name: str, load: Load) -> RequestTimes:
    """One request of fixed lengths."""
    stages = [s.model_stage for s in omni.config.stages]
    text_stage, codec_stage, sound_stage = stages
    request = OmniRequest(
        name,
        omni.render([{"role": "user", "content": " ".join(["word"] * load.prompt_words)}]),
        sampling={
            text_stage: {"max_tokens": load.text_tokens, "min_tokens": load.text_tokens, "ignore_eos": True},
            codec_stage: {"max_tokens": load.codec_tokens, "min_tokens": load.codec_tokens},
        },
    )
    seen: dict[str, list[float]] = {stage: [] for stage in stages}
    samples, started_s = 0, time.perf_counter()
    async for event in omni.stream(request):
        if event.chunk.pcm is not None:
            samples += len(event.chunk.pcm.samples)
        elif event.stage == sound_stage:
            continue  # the last chunk, which has no sound
        seen[event.stage].append(time.perf_counter() - started_s)
    return RequestTimes(
        first_text_s=seen[text_stage][0],
        last_text_s=seen[text_stage][-1],
        first_code_s=seen[codec_stage][0],
        last_code_s=seen[codec_stage][-1],
        first_audio_s=seen[sound_stage][0],
        total_s=time.perf_counter() - started_s,
        audio_s=samples / SAMPLE_RATE_HZ,
    )


async def measured(omni: AsyncOmniLLM, concurrency: int, rounds: int, load: Load) -> dict[str, Any]:
    """`rounds` bursts of `concurrency` requests at once, after a burst that is not counted."""
    times: list[RequestTimes] = []
    wall_s = 0.0
    for number in range(rounds + 1):
        started_s = time.perf_counter()
        burst = await asyncio.gather(*[timed(omni, f"{concurrency}-{number}-{i}", load) for i in range(concurrency)])
        if number:
            times += burst
            wall_s += time.perf_counter() - started_s
    return {
        "concurrency": concurrency,
        "requests": len(times),
        "requests_per_s": len(times) / wall_s,
        "audio_s_per_s": sum(t.audio_s for t in times) / wall_s,
        "p50": {f.name: statistics.median(getattr(t, f.name) for t in times) for f in dataclasses.fields(RequestTimes)},
    }


def machine() -> dict[str, str]:
    import vllm

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"card": card, "python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments.config, known_families=known_families())
    if arguments.model:
        config = config.model_copy(update={"model": arguments.model})
    omni = AsyncOmniLLM(config)
    started_s = time.perf_counter()
    await omni.start()
    load = Load(arguments.prompt_words, arguments.text_tokens, arguments.codec_tokens)
    result: dict[str, Any] = {"machine": machine(), "load": dataclasses.asdict(load)}
    result["start_s"] = time.perf_counter() - started_s
    try:
        result["cells"] = []
        for concurrency in arguments.concurrency:
            result["cells"].append(await measured(omni, concurrency, arguments.rounds, load))
            print(json.dumps(result["cells"][-1]), flush=True)
        result["counts_after"] = await omni.counts()
    finally:
        await omni.shutdown()
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--model", default=None, help="a checkpoint folder, in place of the configuration's")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-words", type=int, default=20)
    parser.add_argument("--text-tokens", type=int, default=16)
    parser.add_argument("--codec-tokens", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args(argv)
    result = json.dumps(asyncio.run(run(arguments)), indent=1)
    print(result)
    if arguments.out:
        arguments.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
