"""Code2wav alone under open-loop arrivals: batches as they were before, and steps that jobs join and leave.

    python benchmarks/code2wav_open_loop.py MODEL OUT.json [--make 7b] [--rates 3 5 7 9 11] [--seconds 60]
        [--policies batches one-piece steps] [--max-batch-frames 3072] [--neighbours] [--device cuda]

MODEL is a checkpoint's folder, of which only token2wav is read; --make writes that much of one first. Talkers are
played: codes come at the pace that benchmarks/notes/2026-11-21-budget.md has or, with --neighbours, at that of a
thinker's and a talker's matrix products, which then take their share of the card. Policies: `batches` runs all steps
of a batch at once, as it was before; `one-piece` steps, of one piece of a stream at a time, `two-pieces` of two;
`steps` is the product. Prints step times, vocoder times and a line for each policy and rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_cluster.bench.player import play
from omni_cluster.bench.record import AudioArrival
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.jobs import LoopJob
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen2_5_omni.checkpoint import make_checkpoint
from omni_cluster.models.qwen2_5_omni.code2wav import SAMPLE_RATE_HZ, Code2WavSession, CodeBlocks
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import SoundEngineStopped
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

PRIORS = Code2Wav.priors
TEXT_TOKENS = 64
FIRST_CODE_S, FIRST_CODE_MORE_S = 0.053, 0.0075
TOKEN_S, TOKEN_MORE_S = 0.0052, 0.00016
CODE_S, CODE_MORE_S = 0.0014, 0.00017
"""Of the talker's first code, of each during the text, of each later; and what every other request adds to it."""
HTTP_S = 0.010
TICK_S = 0.002
CHUNK_CODES = (24, 6)
"""Codes come one by one until there are so many, then at least so many together: the family's pace."""


class WholeBatches:
    """What is due first, all its steps at once: nothing joins a batch that runs."""

    def __init__(self, max_frames: int, max_jobs: int) -> None:
        self._max_frames, self._max_jobs = max_frames, max_jobs

    def choose(self, jobs: Sequence[LoopJob]) -> list[LoopJob]:
        if begun := [job for job in jobs if job.is_begun]:
            return begun
        batch: list[LoopJob] = []
        for job in sorted(jobs, key=lambda job: job.due_s)[: self._max_jobs]:
            if batch and sum(one.size for one in batch) + job.size > self._max_frames:
                break
            batch.append(job)
        return batch

    def to_finish(self, ended: Sequence[LoopJob], others: bool) -> list[LoopJob]:
        return list(ended)

    def took(self, time: StepTime) -> None:
        pass


def by_slack(config: Code2WavOptions) -> StepScheduler:
    return StepScheduler(config.max_batch_frames, config.max_batch_size, PRIORS, cost_of_steps(), time.monotonic)


def cost_of_steps() -> StepCost:
    return StepCost(PRIORS.step, PRIORS.usual_sizes)


@dataclass(frozen=True, slots=True)
class Policy:
    """Who chooses the jobs of a step, and how many pieces of one stream are made at once."""

    scheduler: Callable[[Code2WavOptions], StepScheduler | WholeBatches]
    pieces_at_once: int


POLICIES = {
    "batches": Policy(lambda config: WholeBatches(config.max_batch_frames, config.max_batch_size), 1),
    "one-piece": Policy(by_slack, 1),
    "two-pieces": Policy(by_slack, 2),
    "steps": Policy(by_slack, 3),
}


class Watched:
    """A scheduler whose steps are counted."""

    def __init__(self, scheduler: StepScheduler | WholeBatches) -> None:
        self._scheduler = scheduler
        self.frames: list[int] = []
        self.times: list[StepTime] = []

    def choose(self, jobs: Sequence[LoopJob]) -> list[LoopJob]:
        chosen = self._scheduler.choose(jobs)
        self.frames.append(sum(job.size for job in chosen))
        return chosen

    def to_finish(self, ended: Sequence[LoopJob], others: bool) -> list[LoopJob]:
        return self._scheduler.to_finish(ended, others)

    def took(self, time: StepTime) -> None:
        self.times.append(time)
        self._scheduler.took(time)


@dataclass(slots=True, eq=False)
class Voice:
    """One answer: the codes that its talker has said, and where its chunks go."""

    number: int
    codes: int
    arrived_s: float
    said: float = 0.0
    sent: int = 0
    chunks: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    @property
    def writes(self) -> bool:
        """Its text is still being written."""
        return self.said < TEXT_TOKENS

    def send(self) -> None:
        """What it has said and not sent, once that is a chunk."""
        new = min(self.codes, int(self.said)) - self.sent
        ended = self.sent + new == self.codes
        if new >= (1 if self.sent < CHUNK_CODES[0] else CHUNK_CODES[1]) or (ended and new):
            self.chunks.put_nowait(new)
            self.sent += new
        if ended:
            self.chunks.put_nowait(None)

    async def read(self) -> AsyncIterator[StageChunk]:
        random_codes = np.random.RandomState(self.number).randint(0, 8192, (self.codes, 1)).astype(np.int16)
        position = 0
        while (count := await self.chunks.get()) is not None:
            yield StageChunk(codes=Codes(position, 1, random_codes[position : position + count].tobytes()))
            position += count
        yield StageChunk(finish_reason="length")


class Neighbours:
    """A thinker and a talker of 7B dimensions as what they are to the card: a step's matrix products, as one graph."""

    def __init__(self, rows: int = 16) -> None:
        self.tokens = self.codes = 0
        self.writing = self.speaking = False
        self._ends = False
        # The thinker is below the others, as in the shipped configuration.
        self._graphs = {
            "tokens": captured(layers=28, hidden=3584, inner=18_944, heads=4_608, rows=rows, priority=0),
            "codes": captured(layers=24, hidden=896, inner=18_944, heads=2_560, rows=rows, priority=-1),
        }
        self._threads = [threading.Thread(target=self._work, args=(name,), daemon=True) for name in self._graphs]
        for thread in self._threads:
            thread.start()

    def _work(self, name: str) -> None:
        graph, stream, _ = self._graphs[name]
        ended = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            while not self._ends:
                if not (self.writing if name == "tokens" else self.speaking):
                    time.sleep(5e-4)
                    continue
                graph.replay()
                ended.record()
                ended.synchronize()
                time.sleep(3e-4)  # sampling and scheduling
                setattr(self, name, getattr(self, name) + 1)

    def end(self) -> None:
        self._ends = True
        for thread in self._threads:
            thread.join()


def captured(
    layers: int, hidden: int, inner: int, heads: int, rows: int, priority: int
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream, list[torch.Tensor]]:
    """A decoding step's products for `rows` requests, and the tensors that it reads, which must live as long."""
    shapes = [(hidden, heads), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    weights = [torch.empty(layers, *shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.01) for shape in shapes]
    start = torch.full((rows, hidden), 0.01, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream(priority=priority)

    def step() -> None:
        state = start
        for qkv, out, up, down in zip(*weights, strict=True):
            state = state + (state @ qkv)[:, :1] + state @ out
            state = state + (state @ up)[:, :inner] @ down

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph, stream, [start, *weights]


class Talkers:
    """All answers' codes, as time or the neighbours' steps go on."""

    def __init__(self, neighbours: Neighbours | None) -> None:
        self._neighbours = neighbours
        self._speaking: list[Voice] = []

    def begin(self, voice: Voice) -> None:
        self._speaking.append(voice)

    async def run(self) -> None:
        before_s, tokens, codes = time.monotonic(), 0.0, 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            if self._neighbours is None:
                others = len(self._speaking) - 1
                tokens, codes = (now_s - before_s) / (TOKEN_S + TOKEN_MORE_S * others), 0.0
                codes = (now_s - before_s) / (CODE_S + CODE_MORE_S * others)
            else:
                tokens, codes = self._steps_of_neighbours()
            before_s = now_s
            self._say(now_s, tokens, codes)

    def _steps_of_neighbours(self) -> tuple[float, float]:
        near = self._neighbours
        assert near is not None
        tokens, codes = near.tokens, near.codes
        near.tokens -= tokens
        near.codes -= codes
        near.writing = any(voice.writes for voice in self._speaking)
        near.speaking = bool(self._speaking)
        return tokens, codes

    def _say(self, now_s: float, tokens: float, codes: float) -> None:
        first_s = FIRST_CODE_S + FIRST_CODE_MORE_S * min(16, len(self._speaking))
        for voice in self._speaking:
            if now_s - voice.arrived_s > first_s:
                voice.said += tokens if voice.writes else codes
                voice.send()
        self._speaking = [voice for voice in self._speaking if voice.said < voice.codes]


class Bench:
    """One loaded model, measured under one policy and rate after another."""

    def __init__(self, folder: Path, device: str, config: Code2WavOptions) -> None:
        self.config = config
        self._device = torch.device(device)
        raw = read_config(folder)
        self._ids, self._blocks = SpecialIds.from_config(raw), CodeBlocks.from_config(raw)
        if device == "cuda":  # above the thinker, as in the shipped configuration
            torch.cuda.graph.default_capture_stream = torch.cuda.Stream(priority=-1)
        started_s = time.monotonic()
        self.voices = load_voices(folder)
        self.model = Code2WavModel(folder, self.voices, self._device, config)
        if device == "cuda":
            torch.cuda.synchronize()  # the model runs on another stream from here on
        self.load_s = time.monotonic() - started_s
        self._thread = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.here, method, *args)

    def here(self, method: str, *args: Any) -> Any:
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            return getattr(self.model, method)(*args)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def job(self, blocks: int, seed: int = 0) -> SoundJob:
        codes = np.random.RandomState(seed).randint(0, 8192, blocks * self._blocks.codes_per_block)
        samples = range(len(codes) * self._blocks.samples_per_code)
        size = len(codes) * self._blocks.frames_per_code
        return SoundJob(codes[:, None], samples, size, next(iter(self.voices)), seed)

    # -------------------------------------------------------- one thing at a time

    def step_ms(self, blocks: int, mixed: bool) -> float:
        """A step of jobs of two blocks, at the same step of the flow or at different ones."""
        jobs = range(blocks // 2)
        for number in jobs:
            self.here("begin", number, self.job(2, number))
        if mixed:
            for number in jobs:
                for _ in range(number % 3):
                    self.here("step", [number])
        self.here("step", jobs)
        self.wait()
        started_s = time.perf_counter()
        for _ in range(5):
            self.here("step", jobs)
        self.wait()
        taken_s = time.perf_counter() - started_s
        self.here("drop", jobs)
        return 1000 * taken_s / 5

    def finish_ms(self, jobs: int, blocks: int) -> float:
        taken = []
        for _ in range(3):
            for number in range(jobs):
                self.here("begin", number, self.job(blocks, number))
            self.wait()
            started_s = time.perf_counter()
            self.here("finish", range(jobs))
            taken.append(time.perf_counter() - started_s)
        return 1000 * statistics.median(taken)

    def deviation(self) -> float:
        """How far a job that others joined at different steps is from the same alone; 1 is full scale."""
        alone = self._alone(self.job(3, 77))
        self.here("begin", 0, self.job(3, 77))
        for step in range(self.model.steps):
            self.here("begin", 1 + step, self.job(1 + step, step))
            self.here("step", range(2 + step))
        (joined,) = self.here("finish", [0])
        self.here("drop", range(1, 1 + self.model.steps))
        return float(np.abs(alone - joined).max())

    def _alone(self, job: SoundJob) -> np.ndarray:
        self.here("begin", 0, job)
        for _ in range(self.model.steps):
            self.here("step", [0])
        (wave,) = self.here("finish", [0])
        return wave  # type: ignore[no-any-return]

    # ------------------------------------------------------------- open loop

    async def open_loop(
        self, policy: Policy, rate: float, seconds: float, codes: int, near: Neighbours | None, seed: int
    ) -> dict[str, Any]:
        watched, talkers = Watched(policy.scheduler(self.config)), Talkers(near)
        config = self.config.model_copy(update={"max_pieces_at_once": policy.pieces_at_once})
        rate_hz = SAMPLE_RATE_HZ
        slack = Slack(self.model.steps, config.max_batch_frames, PRIORS, cost_of_steps(), time.monotonic)
        stopped = functools.partial(SoundEngineStopped, "ended")
        steps, overlaps = self.model.steps, self.model.overlaps
        loop = StepLoop(self.call, steps, rate_hz, config, watched, stopped, slack, overlaps=overlaps)
        tasks = [asyncio.create_task(loop.run()), asyncio.create_task(talkers.run())]
        gaps = random.Random(seed)
        arrivals = itertools.accumulate(gaps.expovariate(rate) for _ in itertools.count())
        started_s = time.monotonic()
        heard = await asyncio.gather(
            *(
                self._listen(loop, talkers, number, started_s + at_s, codes)
                for number, at_s in enumerate(itertools.takewhile(lambda at_s: at_s < seconds, arrivals))
            )
        )
        wall_s = time.monotonic() - started_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return figures(heard, watched, wall_s)

    async def _listen(self, loop: StepLoop, talkers: Talkers, number: int, at_s: float, codes: int) -> Heard:
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        voice = Voice(number, codes, time.monotonic())
        talkers.begin(voice)
        asked = OmniRequest(f"{number}", "", seed=number, streams_audio=True)
        speaker, blocks = next(iter(self.voices)), self.config.max_piece_blocks
        session = Code2WavSession(asked, voice.read(), self._ids, self._blocks, speaker, blocks)
        chunks = []
        async with contextlib.aclosing(loop.waveforms(session, Playback())) as waveforms:
            async for _, samples in waveforms:
                chunks.append(AudioArrival(time.monotonic() - voice.arrived_s + HTTP_S, len(samples)))
        return Heard(chunks)


@dataclass(slots=True)
class Heard:
    chunks: list[AudioArrival]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 95, 99)}


def figures(heard: Sequence[Heard], watched: Watched, wall_s: float) -> dict[str, Any]:
    stalls = [play(one.chunks, 24_000).stall_s for one in heard]
    frames = watched.frames or [0]
    return {
        "streams": len(heard),
        "without_gap": sum(stall == 0 for stall in stalls) / len(stalls),
        "stall_s": quantiles(stalls),
        "first_audio_s": quantiles([one.chunks[0].at_s for one in heard]),
        "pieces": statistics.mean(len(one.chunks) for one in heard),
        "steps": len(frames),
        "blocks_a_step": round(statistics.mean(frames) / 24, 1),
        "step_ms": {k: 1000 * v for k, v in quantiles([t.seconds for t in watched.times] or [0]).items()},
        "busy": round(sum(t.seconds for t in watched.times) / wall_s, 3),
        "sound_s_a_second": round(sum(c.samples for one in heard for c in one.chunks) / 24_000 / wall_s, 1),
    }


def line(name: str, rate: float, f: dict[str, Any]) -> str:
    stall, first, step = f["stall_s"], f["first_audio_s"], f["step_ms"]
    return (
        f"{name:10} {rate:4g}/s {f['streams']:4} streams, no gap {100 * f['without_gap']:5.1f} % | stall p50/95/99 "
        f"{stall['p50']:.3f} {stall['p95']:.3f} {stall['p99']:.3f} s | first audio {first['p50']:.3f} "
        f"{first['p95']:.3f} {first['p99']:.3f} s | {f['blocks_a_step']:5.1f} blocks a step, {step['p50']:.1f} / "
        f"{step['p95']:.1f} ms | flow busy {f['busy']:.2f} | {f['sound_s_a_second']:.0f} s/s"
    )


def tables(bench: Bench, sizes: Sequence[int]) -> Iterator[tuple[str, Any]]:
    steps = {
        f"{blocks} {'mixed' if mixed else 'equal'}": round(bench.step_ms(blocks, mixed), 3)
        for blocks in sizes
        for mixed in (False, True)
    }
    yield "step_ms_by_blocks", steps
    shapes = [(1, 2), (4, 2), (16, 2), (1, 9), (4, 9), (1, 17), (4, 17)]
    yield "finish_ms_by_jobs_x_blocks", {f"{j} x {b}": round(bench.finish_ms(j, b), 3) for j, b in shapes}
    yield "largest_deviation_when_joined", bench.deviation()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--make", metavar="PRESET")
    parser.add_argument("--rates", type=float, nargs="*", default=[3, 5, 7, 9, 11])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--codes", type=int, default=512)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["batches", "steps"])
    parser.add_argument("--max-batch-frames", type=int, default=3072)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 4, 8, 16, 24, 32, 48, 64, 96, 128])
    parser.add_argument("--neighbours", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vocoder-dtype", default="tfloat32")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = Code2WavOptions(
        max_batch_size=64,
        max_wait_ms=2,
        max_batch_frames=options.max_batch_frames,
        max_streams=128 if options.device == "cuda" else 8,
        max_piece_blocks=16,
        num_steps=options.num_steps,
        dtype=options.dtype,
        vocoder_dtype=options.vocoder_dtype,
    )
    if options.make and not options.model.exists():
        make_checkpoint(options.make, options.model, device=options.device, only="token2wav.", progress=print)
    bench = Bench(options.model, options.device, config)
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "torch": torch.__version__, "open_loop": []}
    result |= {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "load_s": bench.load_s}
    print(f"loaded in {bench.load_s:.1f} s", flush=True)

    def write() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    for name, table in tables(bench, options.sizes):
        result[name] = table
        print(f"{name}: {table}", flush=True)
        write()
    near = Neighbours() if options.neighbours else None
    for rate, policy in itertools.product(options.rates, options.policies):
        run = bench.open_loop(POLICIES[policy], rate, options.seconds, options.codes, near, options.seed)
        made = asyncio.run(run)
        result["open_loop"].append({"policy": policy, "rate_per_s": rate, "neighbours": near is not None, **made})
        print(line(policy, rate, made), flush=True)
        write()
    if near is not None:
        near.end()


if __name__ == "__main__":
    main()
