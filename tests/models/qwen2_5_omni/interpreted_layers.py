"""`python -m tests.models.qwen2_5_omni.interpreted_layers CHECKPOINT`: the layers' one kernel, as Triton interprets it.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints how far the kernel's
output, residual stream and kept blocks are from those of the plain layers, and the scales of a norm in float8.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from omni_cluster.kernels.float8 import Float8Rows
from omni_cluster.models.qwen2_5_omni import dit_kernels
from omni_cluster.models.qwen2_5_omni.dit import NORM_EPS, BlockDiT
from tests.models.qwen2_5_omni.dit_cases import SIZE, blocks, make_dit

LAYOUT = ([-5, 0], [1, -1], [24, 10], [1, -1])
"""The first block sees one that was kept and the next one, and is kept itself; the second is a short one."""
POINT = (5, 7)


@torch.inference_mode()
def differences(folder: Path) -> list[float]:
    plain, one_kernel = (make_dit(folder, "cpu", resident_blocks=blocks_at_most) for blocks_at_most in (0, 2))
    assert one_kernel.resident is not None
    layout, point = blocks(*LAYOUT), torch.tensor(POINT)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2 * len(POINT) * SIZE, plain.layers[0].out.shape[0], generator=generator)
    plain.store.normal_(generator=generator)
    one_kernel.store.copy_(plain.store)
    again = hidden.clone()
    wanted = plain._layer_by_layer(hidden, point, layout)
    made = one_kernel.resident(again, point, layout, one_kernel.rotary, one_kernel.store, NORM_EPS)
    there = (torch.arange(SIZE) < layout.length[:, None]).flatten().repeat(2)
    pairs = ((made[there], wanted[there]), (again[there], hidden[there]), (one_kernel.store, plain.store))
    return [float((a - b).norm() / b.norm()) for a, b in (*pairs, float8_scales(plain, hidden, made, point))]


def float8_scales(
    dit: BlockDiT, hidden: torch.Tensor, out: torch.Tensor, point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the modulated norm of what a layer leaves: the kernel's, and those of plain PyTorch."""
    shift, scale, gate = dit.modulation[1][:3]
    given = (out, gate, scale, shift, point)
    wanted = dit._add_and_norm(hidden.clone(), *given, in_float8=True)
    made = Float8Rows.empty_like(hidden)
    dit_kernels.add_and_norm(hidden.clone(), *given, SIZE, NORM_EPS, made.values, made.scales)
    assert isinstance(wanted, Float8Rows)
    return made.scales, wanted.scales


if __name__ == "__main__":
    print(*differences(Path(sys.argv[1])))
