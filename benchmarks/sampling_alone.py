"""The talker's sampling alone, as it is and as it was before noise was counted: time on the host and launches a token.

    python -m benchmarks.sampling_alone [--device cpu|cuda] [--rows 1 16 32] [--rounds 40]

Both versions take turns in one process, so that their ratio means something on a busy host too. Launches are the same
on every device. Microseconds are of use with a card only: there the host launches, without one it computes as well.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_cluster.models.seeded_noise import state_of
from omni_cluster.vllm_engine.worker.sampled_rows import MAX_K, SampledRows
from omni_cluster.vllm_engine.worker.top_k_sampler import TopKSampler

CODES, TOP_K, TOP_P = 8448, 40, 0.8
"""What the talker of the published checkpoint draws from, and how."""
TOKENS_A_STEP = 8
KINDS = ("no seeds", "one seeded", "all seeded")

Step = Callable[[], object]
"""Samples all tokens of an engine's step."""


class Batch:
    """Rows that draw as a talker's do by default, the first `seeded` of them by seeds."""

    def __init__(self, rows: int, seeded: int, device: torch.device) -> None:
        self.size, self.seeds = rows, list(range(seeded))
        self.logits = torch.randn(rows, CODES, device=device)
        self.k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
        self.p = torch.full((rows,), TOP_P, device=device)

    def now(self) -> Step:
        """As the sampler is."""
        states = [state_of(seed) for seed in self.seeds] + [None] * (self.size - len(self.seeds))
        told: list[Any] = []
        sampler = TopKSampler(torch.nn.Identity(), lambda: tuple(told))

        def step() -> None:
            bounds = np.full(self.size, TOP_K), np.full(self.size, TOP_P)
            nobody, first = np.zeros(self.size, bool), np.full(self.size, 3)
            rows = SampledRows.of(bounds, nobody, states, first, TOKENS_A_STEP, self.logits.device)
            for ahead in range(TOKENS_A_STEP):
                told[:] = rows, ahead
                sampler(self.logits, {}, self.k, self.p)

        return step

    def before(self) -> Step:
        """As it was: rows looked at anew for each token, a generator seeded for each seeded row."""
        indices = itertools.count(3)
        sampler = SamplerBefore(lambda: self._rows_before(next(indices)), self.logits.device)

        def step() -> None:
            for _ in range(TOKENS_A_STEP):
                sampler(self.logits, self.k, self.p)

        return step

    def _rows_before(self, index: int) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
        nobody = np.zeros(self.size) == 1
        seeds = {row: seed_before(seed, index) for row, seed in enumerate(self.seeds)}
        return np.full(self.size, TOP_K), nobody, seeds


class SamplerBefore(torch.nn.Module):
    """What `TopKSampler` did for rows of a small top-k."""

    def __init__(self, rows: Callable[[], tuple[np.ndarray, np.ndarray, dict[int, int]]], device: torch.device) -> None:
        super().__init__()
        self._rows, self._generator = rows, torch.Generator(device)

    def forward(self, logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        top_k, greedy, seeds = self._rows()
        few = (top_k <= MAX_K) & ~greedy
        few = few | greedy if few.any() else few
        alone = [row for row in seeds if not few[row] and not greedy[row]]
        if not few.all() or alone:
            raise ValueError("the batch has rows that do not draw among few")
        values, ids = logits.topk(MAX_K, dim=-1)
        probabilities = within_before(values, k.clamp(max=MAX_K), p)
        noise = torch.empty_like(probabilities).exponential_()
        for row, seed in seeds.items():
            self._generator.manual_seed(seed)
            whole = torch.empty(logits.shape[-1], device=ids.device).exponential_(generator=self._generator)
            noise[row] = whole[ids[row]]
        return ids.gather(1, (probabilities / noise).argmax(dim=-1, keepdim=True))[:, 0]


def seed_before(seed: int, index: int) -> int:
    return int.from_bytes(blake2b(struct.pack("<Qq", seed % 2**64, index), digest_size=8).digest(), "little")


def within_before(values: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    least = values.gather(1, (k.long() - 1).unsqueeze(1))
    probabilities = values.masked_fill(values < least, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    return probabilities.masked_fill(before >= p.unsqueeze(1), 0.0)


class Launches(TorchDispatchMode):
    """Counts operations that make something: views and empty tensors launch nothing on a card."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.__name__)
        return func(*args, **(kwargs or {}))


def launches_a_token(step: Step) -> float:
    with Launches() as launches:
        step()
    return launches.count / TOKENS_A_STEP


def host_us_a_token(step: Step, device: torch.device) -> float:
    clock = time.thread_time  # on a CPU that others use too
    if device.type == "cuda":
        clock = time.perf_counter
        torch.cuda.synchronize()
    began = clock()
    step()
    return (clock() - began) / TOKENS_A_STEP * 1e6


def compared(rows: int, kind: str, device: torch.device, rounds: int) -> str:
    """A line of the table."""
    batch = Batch(rows, {"no seeds": 0, "one seeded": 1, "all seeded": rows}[kind], device)
    now, before = batch.now(), batch.before()
    pairs = [(host_us_a_token(now, device), host_us_a_token(before, device)) for _ in range(rounds + 3)][3:]
    new, old = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    counted = f"{launches_a_token(now):8.1f} {launches_a_token(before):8.1f}"
    return f"{rows:4d}  {kind:10s} {counted} {new:9.0f} {old:9.0f} {ratio:8.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("              launches a token     us a token, median")
    print("rows               now   before       now    before now/before")
    for rows in options.rows:
        for kind in KINDS if rows > 1 else KINDS[::2]:
            print(compared(rows, kind, torch.device(options.device), options.rounds), flush=True)


if __name__ == "__main__":
    main()
