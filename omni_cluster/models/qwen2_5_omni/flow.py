"""The flow that turns noise into mel frames: the reference's times and its Runge-Kutta method, over packed blocks."""

from __future__ import annotations

import itertools
from dataclasses import fields

import torch

from omni_cluster.models.cuda_graphs import CapturedWork, GraphPool, size_at_least
from omni_cluster.models.qwen2_5_omni.dit import NO_BLOCK, BlockDiT, PackedBlocks

NUM_STEPS = 10
SWAY_COEFFICIENT = -1.0
EVALUATIONS = 4
"""Of the velocity in one step."""


def time_points(device: torch.device) -> torch.Tensor:
    """The reference's sway-sampled times, float32 `[NUM_STEPS]` from 0 to 1."""
    times = torch.linspace(0, 1, NUM_STEPS, device=device)
    return times + SWAY_COEFFICIENT * (torch.cos(torch.pi / 2 * times) - 1 + times)


def evaluation_times(device: torch.device) -> torch.Tensor:
    """All times at which the velocity is evaluated, in order: float32 `[EVALUATIONS * (NUM_STEPS - 1)]`."""
    times = []
    for start, end in itertools.pairwise(time_points(device)):
        step = end - start
        times += [start, start + step * (1 / 3), start + step * (2 / 3), end]
    return torch.stack(times)


class Flow:
    """Solves the flow for a batch of blocks; on CUDA by replaying one captured step for batches of usual sizes.

    `graph_blocks`: the sizes to capture, in blocks; a batch is filled up to the next of them, one larger than all of
    them runs without a graph.
    """

    def __init__(self, dit: BlockDiT, device: torch.device, graph_blocks: tuple[int, ...] = ()) -> None:
        self._dit = dit
        self._device = device
        self._steps = time_points(device).diff()
        pool = GraphPool() if graph_blocks else None
        self._graphs = {size: self._capture(size, pool) for size in sorted(graph_blocks, reverse=True) if pool}

    def solve(self, noise: torch.Tensor, blocks: PackedBlocks) -> torch.Tensor:
        """Noise float32 `[N, 24, 80]` -> mel frames of the same shape; frames past a block's length mean nothing."""
        num_blocks = noise.shape[0]
        size = size_at_least(num_blocks, self._graphs)
        if size is None:
            return self._solve(FlowStep(self._dit, noise, blocks, self._steps))
        work = self._graphs[size]
        work.inputs.fill(noise, blocks)
        return self._replay(work)[:num_blocks]

    def _solve(self, step: FlowStep) -> torch.Tensor:
        step.begin()
        for _ in range(NUM_STEPS - 1):
            step.advance()
        return step.state.view(step.blocks.length.shape[0], self._dit.block_size, -1)

    def _replay(self, work: CapturedWork[FlowStep, None]) -> torch.Tensor:
        work.inputs.begin()
        for _ in range(NUM_STEPS - 1):
            work.replay()
        return work.inputs.state.view(-1, self._dit.block_size, self._dit.mel_dim)

    def _capture(self, size: int, pool: GraphPool) -> CapturedWork[FlowStep, None]:
        noise = torch.zeros(size, self._dit.block_size, self._dit.mel_dim, device=self._device)
        step = FlowStep(self._dit, noise, fillers(size, self._dit, self._device), self._steps)
        step.begin()
        return CapturedWork(step, step.advance, pool)


class FlowStep:
    """One step of the solution, in place, on tensors that stay where they are."""

    def __init__(self, dit: BlockDiT, noise: torch.Tensor, blocks: PackedBlocks, steps: torch.Tensor) -> None:
        self._dit = dit
        self._steps = steps
        self._point = torch.zeros(1, dtype=torch.long, device=noise.device)
        self.blocks = blocks
        self.state = noise.flatten(0, 1).clone()
        self._conditions = dit.conditions(blocks)

    def fill(self, noise: torch.Tensor, blocks: PackedBlocks) -> None:
        """Takes over a batch that is no larger; the rest of the places become blocks that only fill the batch."""
        num_blocks = noise.shape[0]
        self.state[: num_blocks * self._dit.block_size].copy_(noise.flatten(0, 1))
        for field in fields(PackedBlocks):
            getattr(self.blocks, field.name)[:num_blocks].copy_(getattr(blocks, field.name))
        for indices in (self.blocks.previous, self.blocks.following, self.blocks.keep):
            indices[num_blocks:].fill_(NO_BLOCK)

    def begin(self) -> None:
        self._point.zero_()
        self._conditions.copy_(self._dit.conditions(self.blocks))

    def advance(self) -> None:
        """The 3/8-rule Runge-Kutta step of the reference (`RungeKutta4ODESolver`), from one time to the next."""
        state, step = self.state, self._steps[self._point // EVALUATIONS]
        k1 = self._velocity(state)
        k2 = self._velocity(state + step * k1 * (1 / 3))
        k3 = self._velocity(state + step * (k2 - k1 * (1 / 3)))
        k4 = self._velocity(state + step * (k1 - k2 + k3))
        state += (k1 + 3 * (k2 + k3) + k4) * step / 8

    def _velocity(self, state: torch.Tensor) -> torch.Tensor:
        velocity = self._dit.velocity(self._point, state, self._conditions, self.blocks)
        self._point += 1
        return velocity


def graph_sizes(max_blocks: int) -> tuple[int, ...]:
    """Sizes to capture, in blocks, up to one that holds `max_blocks`: steps of a quarter, so that little is filled."""
    sizes = [2, 3, 4, 6, 8]
    while sizes[-1] < max_blocks:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return tuple(sizes)


def fillers(size: int, dit: BlockDiT, device: torch.device) -> PackedBlocks:
    """Blocks of nobody."""
    none = torch.full((size,), NO_BLOCK, dtype=torch.int32, device=device)
    zero = torch.zeros(size, dtype=torch.int32, device=device)
    codes = torch.zeros(size, dit.block_size // dit.repeats, dtype=torch.long, device=device)
    return PackedBlocks(none, none.clone(), zero, none.clone(), zero.clone(), codes)
