"""Milliseconds of one step of the flow on a card: layer by layer, and with all layers as one kernel.

    python -m benchmarks.dit_step_alone [--blocks 2 4 8] [--beside thinker talker]

The DiT has the sizes of the 7B model and random weights. `--beside`: other processes compute meanwhile, without pause,
products of the sizes of a thinker's or a talker's layers; with NVIDIA's MPS daemon they share the card as stages do.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from omni_cluster.models.qwen2_5_omni.dit import BLOCK_ROWS, NO_BLOCK, BlockDiT
from omni_cluster.models.qwen2_5_omni.flow import Flow, FlowJob, evaluation_times
from omni_cluster.models.qwen2_5_omni.voices import Voice

REPEATS = 25
NEIGHBOURS = {"thinker": (3584, 18944, 8), "talker": (896, 1536, 24)}
"""Width, features between, and layers of what computes beside."""
READY = "ready"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dit_step_alone", description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12])
    parser.add_argument("--beside", nargs="*", default=[], choices=NEIGHBOURS)
    parser.add_argument("--be", choices=NEIGHBOURS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    with torch.inference_mode():
        compute_for_ever(*NEIGHBOURS[asked.be]) if asked.be else compare(asked.blocks, asked.beside)


def compare(sizes: Sequence[int], beside: Sequence[str]) -> None:
    device = torch.device("cuda")
    dit = random_dit(device, max(sizes))
    flows = {}
    for name, resident in (("layer by layer", 0), ("one kernel", max(sizes))):
        dit.resident_blocks = resident
        flows[name] = Flow(dit, device, tuple(sizes))
    with contextlib.ExitStack() as stack:
        for name in beside:
            stack.enter_context(neighbour(name))
        for name, flow in flows.items():
            print(name, *(f"{size}: {step_ms(flow, size):.3f}" for size in sizes), sep="\t", flush=True)


def random_dit(device: torch.device, resident_blocks: int) -> BlockDiT:
    torch.manual_seed(0)
    config = Qwen2_5OmniDiTConfig()
    config._attn_implementation = "eager"
    with device:
        model = Qwen2_5OmniToken2WavDiTModel(config).eval()
        voice = Voice("Ethan", 0, torch.randn(1, config.enc_emb_dim), torch.randn(1, 30, config.mel_dim))
    return BlockDiT(model, [voice], evaluation_times(device), torch.bfloat16, 2, resident_blocks)


def step_ms(flow: Flow, blocks: int) -> float:
    """The median of several steps of one job."""
    job = FlowJob(table(blocks), torch.randn(blocks * 24, 80, device="cuda"))
    times_ms = []
    for _ in range(REPEATS):
        job.step = 0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        flow.advance([job])
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return float(np.median(times_ms))


def table(blocks: int) -> np.ndarray:
    """A first piece of so many blocks."""
    made = np.zeros((BLOCK_ROWS + 12, blocks), np.int32)
    made[0], made[1], made[2], made[3] = np.arange(blocks) - 1, np.arange(blocks) + 1, 24, NO_BLOCK
    made[1, -1] = NO_BLOCK
    return made


@contextlib.contextmanager
def neighbour(name: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.dit_step_alone", "--be", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != READY:
            raise RuntimeError(f"The neighbour {name} ended before it began.")
        yield
    finally:
        process.kill()
        process.wait()


def compute_for_ever(width: int, between: int, layers: int) -> None:
    rows = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
    weights = [
        (torch.randn(2 * between, width, **like(rows)) * 0.01, torch.randn(width, between, **like(rows)) * 0.01)
        for _ in range(layers)
    ]
    run = captured(rows, weights)
    print(READY, flush=True)
    while True:
        run.replay()
        torch.cuda.synchronize()


def captured(rows: torch.Tensor, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.CUDAGraph:
    def run() -> None:
        hidden = rows
        for up, down in weights:
            gate, other = (hidden @ up.T).chunk(2, dim=1)
            hidden = (torch.nn.functional.silu(gate) * other) @ down.T

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def like(rows: torch.Tensor) -> dict[str, object]:
    return {"device": rows.device, "dtype": rows.dtype}


if __name__ == "__main__":
    main()
