"""The flow that turns noise into mel frames: the reference's times and its Runge-Kutta method, over packed blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least
from omni_cluster.models.qwen2_5_omni.dit import BLOCK_ROWS, NO_BLOCK, BlockDiT, PackedBlocks

NUM_STEPS = 10
"""Points of time in the reference, whose name for them this is: a step lies between two of them."""
SWAY_COEFFICIENT = -1.0
EVALUATIONS = 4
"""Of the velocity in one step."""
NEIGHBOURS, KEEP, STEP = slice(0, 2), 3, 5
"""Rows of a table of blocks; see `PackedBlocks.of`."""


def time_points(device: torch.device, num_steps: int = NUM_STEPS) -> torch.Tensor:
    """The reference's sway-sampled times, float32 `[num_steps]` from 0 to 1."""
    times = torch.linspace(0, 1, num_steps, device=device)
    return times + SWAY_COEFFICIENT * (torch.cos(torch.pi / 2 * times) - 1 + times)


def evaluation_times(device: torch.device, num_steps: int = NUM_STEPS) -> torch.Tensor:
    """All times at which the velocity is evaluated, in order: float32 `[EVALUATIONS * (num_steps - 1)]`."""
    times = []
    for start, end in itertools.pairwise(time_points(device, num_steps)):
        step = end - start
        times += [start, start + step * (1 / 3), start + step * (2 / 3), end]
    return torch.stack(times)


class FlowJob:
    """Blocks of one job between noise and mel, which may pause after any step.

    `table`: int32 on the host, as `PackedBlocks.of` reads it, neighbours as places within the job. `state`: float32
    `[N * 24, 80]` on the device.
    """

    __slots__ = ("state", "step", "table")

    def __init__(self, table: np.ndarray, state: torch.Tensor) -> None:
        self.table = table
        self.state = state
        self.step = 0

    @property
    def blocks(self) -> int:
        return int(self.table.shape[1])


class Flow:
    """Takes jobs from noise to mel in `num_steps - 1` steps; those of one step may each be at another of them.

    The DiT is one of the same `num_steps`, by `evaluation_times`. On CUDA one step is captured for usual numbers of
    blocks: `graph_blocks`, the sizes to capture. A step is filled up to the next of them, one larger than all of them
    runs without a graph.
    """

    def __init__(
        self, dit: BlockDiT, device: torch.device, graph_blocks: tuple[int, ...] = (), num_steps: int = NUM_STEPS
    ) -> None:
        self._dit = dit
        self._device = device
        self._step_sizes = time_points(device, num_steps).diff()
        pool = GraphPool() if graph_blocks else None
        self._graphs = {size: self._capture(size, pool) for size in sorted(graph_blocks, reverse=True) if pool}

    def begin(self, noise: torch.Tensor, table: np.ndarray) -> FlowJob:
        """A job at its first step; noise float32 `[N, 24, 80]` on the host, which does not wait for the device."""
        return FlowJob(table, on_device(noise.flatten(0, 1), self._device))

    def advance(self, jobs: Sequence[FlowJob]) -> None:
        """One step of each job. Returns before the device has made it."""
        blocks = sum(job.blocks for job in jobs)
        size = size_at_least(blocks, self._graphs)
        work = None if size is None else self._graphs[size]
        step = FlowStep(self._dit, blocks, self._step_sizes) if work is None else work.inputs
        step.table.copy_(on_device(torch.from_numpy(packed(jobs, step.table.shape)), self._device))
        frames = blocks * self._dit.block_size
        torch.cat([job.state for job in jobs], out=step.state[:frames])
        step.advance() if work is None else work.replay()
        for job, state in zip(jobs, _parts(step.state[:frames].clone(), jobs), strict=True):
            job.state, job.step = state, job.step + 1

    def _capture(self, size: int, pool: GraphPool) -> CapturedWork[FlowStep, None]:
        step = FlowStep(self._dit, size, self._step_sizes)
        step.table.copy_(torch.from_numpy(packed([], step.table.shape)))
        return CapturedWork(step, step.advance, pool)


class FlowStep:
    """One step of so many blocks, in place, on tensors that stay where they are."""

    def __init__(self, dit: BlockDiT, blocks: int, step_sizes: torch.Tensor) -> None:
        self._dit = dit
        self._step_sizes = step_sizes
        device, rows = step_sizes.device, BLOCK_ROWS + dit.block_size // dit.repeats
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.state = torch.zeros(blocks * dit.block_size, dit.mel_dim, device=device)

    def advance(self) -> None:
        """The 3/8-rule Runge-Kutta step of the reference (`RungeKutta4ODESolver`), each block's from its own time."""
        dit, state, blocks = self._dit, self.state, PackedBlocks.of(self.table)
        conditions, point = dit.conditions(blocks), blocks.step.long() * EVALUATIONS
        step = self._step_sizes[blocks.step.long()].repeat_interleave(dit.block_size)[:, None]
        k1 = dit.velocity(point, state, conditions, blocks)
        k2 = dit.velocity(point + 1, state + step * k1 * (1 / 3), conditions, blocks)
        k3 = dit.velocity(point + 2, state + step * (k2 - k1 * (1 / 3)), conditions, blocks)
        k4 = dit.velocity(point + 3, state + step * (k1 - k2 + k3), conditions, blocks)
        state += (k1 + 3 * (k2 + k3) + k4) * step / 8


def packed(jobs: Sequence[FlowJob], shape: tuple[int, ...]) -> np.ndarray:
    """The jobs' tables side by side, neighbours as places in all of it; blocks of no job are left out."""
    table = np.zeros(shape, np.int32)
    table[NEIGHBOURS] = table[KEEP] = NO_BLOCK
    first = 0
    for job in jobs:
        part = table[:, first : first + job.blocks]
        part[:] = job.table
        part[NEIGHBOURS] += first * (job.table[NEIGHBOURS] >= 0)
        part[STEP] = job.step
        first += job.blocks
    return table


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that waits for nothing the device has to do before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _parts(state: torch.Tensor, jobs: Sequence[FlowJob]) -> Sequence[torch.Tensor]:
    return state.split([len(job.state) for job in jobs])


def graph_sizes(max_blocks: int) -> tuple[int, ...]:
    """Sizes to capture, in blocks, up to one that holds `max_blocks`: steps of a quarter, so that little is filled."""
    sizes = [2, 3, 4, 6, 8]
    while sizes[-1] < max_blocks:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return tuple(sizes)
