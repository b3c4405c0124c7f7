"""The packed DiT: what a block sees, and the CUDA kernels against plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from triton import knobs

from omni_cluster.kernels.float8 import Float8Rows
from omni_cluster.models.qwen2_5_omni import dit_kernels
from omni_cluster.models.qwen2_5_omni.dit import (
    FIRST_SLOT,
    NO_BLOCK,
    BlockDiT,
    gelu_of_linear,
    keep_on_host,
)
from omni_cluster.models.qwen2_5_omni.flow import NUM_STEPS, Flow
from tests.models.qwen2_5_omni.dit_cases import SIZE, blocks, make_dit, table

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def dit(tiny: Path) -> BlockDiT:
    return make_dit(tiny, "cpu")


def solve(dit: BlockDiT, noise: torch.Tensor, layout: np.ndarray, flow: Flow | None = None) -> torch.Tensor:
    flow = flow or Flow(dit, dit.store.device)
    job = flow.begin(noise, layout)
    for _ in range(NUM_STEPS - 1):
        flow.advance([job])
    return job.state.view(noise.shape)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIZE, 80, generator=torch.Generator().manual_seed(seed))


def test_requests_of_a_batch_do_not_see_each_other(dit: BlockDiT) -> None:
    drawn = noise(5)
    together = solve(dit, drawn, table([-1, 0, -1, 2, -1], [1, -1, 3, -1, -1], [24, 24, 24, 10, 24], [-1] * 5))
    first = solve(dit, drawn[:2], table([-1, 0], [1, -1], [24, 24], [-1] * 2))
    torch.testing.assert_close(together[:2], first, atol=1e-5, rtol=0)


def test_frames_past_a_blocks_length_change_nothing(dit: BlockDiT) -> None:
    drawn, other = noise(2), noise(2)
    other[1, 10:] = 5.0
    layout = table([-1, 0], [1, -1], [24, 10], [-1, -1])
    made, again = solve(dit, drawn, layout), solve(dit, other, layout)
    torch.testing.assert_close(made[0], again[0], atol=0, rtol=0)
    torch.testing.assert_close(made[1, :10], again[1, :10], atol=0, rtol=0)


def test_a_kept_block_is_what_the_next_piece_would_have_seen(dit: BlockDiT) -> None:
    """Without a look-ahead the left neighbour's keys and values are all that a block has of what came before it."""
    drawn = noise(3)
    whole = solve(dit, drawn, table([-1, 0, 1], [-1, -1, -1], [24] * 3, [-1] * 3))
    solve(dit, drawn[:2], table([-1, 0], [-1, -1], [24] * 2, [-1, 3]))
    layout = table([FIRST_SLOT - 3], [-1], [24], [-1])
    torch.testing.assert_close(solve(dit, drawn[2:], layout)[0], whole[2], atol=1e-5, rtol=0)
    strangers = table([NO_BLOCK], [-1], [24], [-1])
    assert (solve(dit, drawn[2:], strangers)[0] - whole[2]).abs().max() > 1e-3


def test_blocks_that_fill_the_batch_are_harmless(dit: BlockDiT) -> None:
    drawn = noise(2)
    alone = solve(dit, drawn[:1], table([-1], [-1], [24], [-1]))
    filled = solve(dit, drawn, table([-1, -1], [-1, -1], [24, 0], [-1, -1]))
    torch.testing.assert_close(filled[0], alone[0], atol=1e-6, rtol=0)
    assert filled.isfinite().all()


LAYOUT = (
    [-1, 0, 1, FIRST_SLOT - 3, 3, -1, -1],
    [1, 2, -1, 4, -1, -1, -1],
    [24, 24, 10, 24, 24, 3, 0],
    [-1, -1, -1, 3, -1, -1, 2],
)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("back", "ahead"), [(False, False), (True, False), (False, True), (True, True)])
def test_attention_kernel_is_the_plain_attention(
    tiny: Path, dtype: torch.dtype, close: float, back: bool, ahead: bool
) -> None:
    dit = make_dit(tiny, "cuda", dtype)
    layout = blocks(*LAYOUT, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    inner = dit.num_heads * dit.head_dim
    qkv = torch.randn(2 * 7 * SIZE, 3 * inner, device="cuda", generator=generator).to(dtype)
    dit.store.normal_(generator=generator)
    store, point = dit.store[:, 0] if back else None, torch.tensor([5, 5, 5, 0, 7, 5, 5], device="cuda")
    asked = (qkv, layout, dit.rotary, store, point, ahead, SIZE, dit.num_heads)
    made, wanted = dit_kernels.block_attention(*asked), BlockDiT.attend_on_host(*asked)
    there = (torch.arange(SIZE, device="cuda") < layout.length[:, None]).flatten().repeat(2)
    torch.testing.assert_close(made[there], wanted[there], atol=close, rtol=0)


@pytest.mark.full
def test_one_kernel_of_all_layers_computes_the_plain_layers_as_triton_interprets_it(tiny: Path) -> None:
    command = [sys.executable, "-m", "tests.models.qwen2_5_omni.interpreted_layers", str(tiny)]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    assert len(made) == 4 and all(float(difference) < 1e-5 for difference in made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_kernel_are_the_plain_layers(tiny: Path, dtype: torch.dtype) -> None:
    """What is seen of neighbours and slots, what is kept, and each block's own time; again, for it counts on."""
    plain, resident = (make_dit(tiny, "cuda", dtype, resident_blocks) for resident_blocks in (0, 7))
    layout = blocks(*LAYOUT, device="cuda")
    point = torch.tensor([5, 5, 5, 0, 7, 5, 5], device="cuda")
    there = (torch.arange(SIZE, device="cuda") < layout.length[:, None]).flatten()
    plain.store.normal_(generator=torch.Generator("cuda").manual_seed(1))
    resident.store.copy_(plain.store)
    for seed in range(3):
        state = noise(7, seed).cuda().flatten(0, 1)
        wanted, made = (dit.velocity(point, state, dit.conditions(layout), layout) for dit in (plain, resident))
        close = 1e-5 if dtype == torch.float32 else 2e-2
        assert (made[there] - wanted[there]).norm() <= close * wanted[there].norm()
        assert (resident.store[0] - plain.store[0]).float().norm() <= close * plain.store[0].float().norm()


def test_layers_of_one_kernel_stay_in_bfloat16_beside_those_in_float8(tiny: Path) -> None:
    dit = make_dit(tiny, "cpu", torch.bfloat16, 2, in_float8=True)
    assert dit.resident is not None
    for small, large in zip(dit.resident.layers, dit.layers, strict=True):
        for name in ("qkv", "out", "up", "down"):
            weight, rounded = getattr(small, name), getattr(large, name)
            assert weight.dtype == torch.bfloat16 and isinstance(rounded, Float8Rows)
            values = rounded.values.float() * rounded.scales
            assert (values - weight).norm() < 0.05 * weight.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("resident_blocks", "is_float8"), [(7, False), (6, True)])
def test_small_steps_of_float8_are_bfloat16s(tiny: Path, resident_blocks: int, is_float8: bool) -> None:
    layout, point = blocks(*LAYOUT, device="cuda"), torch.tensor([5, 5, 5, 0, 7, 5, 5], device="cuda")
    state = noise(7).cuda().flatten(0, 1)
    there = (torch.arange(SIZE, device="cuda") < layout.length[:, None]).flatten()
    made, plain = (
        dit.velocity(point, state, dit.conditions(layout), layout)[there]
        for dit in (make_dit(tiny, "cuda", torch.bfloat16, resident_blocks, each) for each in (True, False))
    )
    assert torch.equal(made, plain) != is_float8


@pytest.mark.gpu
def test_keep_kernel_keeps_what_has_a_slot(tiny: Path) -> None:
    dit = make_dit(tiny, "cuda")
    layout = blocks(*LAYOUT, device="cuda")
    qkv = torch.randn(2 * 7 * SIZE, 3 * dit.num_heads * dit.head_dim, device="cuda")
    wanted, point = dit.store.clone(), torch.tensor([5, 5, 5, 0, 7, 5, 5], device="cuda")
    dit_kernels.keep_blocks(qkv, layout.keep, dit.store[:, 0], point, SIZE)
    keep_on_host(qkv, layout.keep, wanted[:, 0], point, SIZE)
    assert wanted[0, 0, 3].abs().sum() > 0
    torch.testing.assert_close(dit.store, wanted, atol=0, rtol=0)


@pytest.mark.gpu
def test_batches_of_any_size_share_what_was_compiled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel for one block, for 16, or for where a row of the table begins would compile in a first load."""
    dit, compiled = make_dit(tiny, "cuda", torch.bfloat16), list[str]()

    def step(count: int) -> None:
        layout = blocks([-1] * count, [-1] * count, [SIZE] * count, [0] + [-1] * (count - 1), device="cuda")
        dit.velocity(
            torch.full([count], 5, device="cuda"), noise(count).cuda().flatten(0, 1), dit.conditions(layout), layout
        )

    step(2)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["fn"].name))
    for count in (1, 3, 4, 16, 33):
        step(count)
    assert compiled == []


@pytest.mark.gpu
def test_norm_kernel_is_the_plain_norm(tiny: Path) -> None:
    """Each block with the modulation of its own time."""
    dit, plain = make_dit(tiny, "cuda"), make_dit(tiny, "cpu")
    shift, scale, gate = dit.modulation[1][:3]
    point = torch.tensor([5, 0, 35], device="cuda")
    hidden, out = torch.randn(2, 2 * 3 * SIZE, shift.shape[1], device="cuda")
    wanted = hidden.cpu()
    wanted_norm = plain._add_and_norm(wanted, out.cpu(), gate.cpu(), scale.cpu(), shift.cpu(), point.cpu())
    made = dit._add_and_norm(hidden, out, gate, scale, shift, point)
    torch.testing.assert_close(hidden.cpu(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(made.cpu(), wanted_norm, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_norm_kernel_in_float8_is_the_plain_norm_in_float8(tiny: Path) -> None:
    dit, plain = (make_dit(tiny, device, torch.bfloat16, in_float8=True) for device in ("cuda", "cpu"))
    shift, scale, gate = dit.modulation[1][:3]
    point = torch.tensor([5, 0, 35], device="cuda")
    hidden, out = torch.randn(2, 2 * 3 * SIZE, shift.shape[1], device="cuda")
    given = (out, gate, scale, shift, point)
    wanted = plain._add_and_norm(hidden.cpu(), *(each.cpu() for each in given), in_float8=True)
    made = dit._add_and_norm(hidden, *given, in_float8=True)
    assert isinstance(made, Float8Rows) and isinstance(wanted, Float8Rows)
    torch.testing.assert_close(made.scales.cpu(), wanted.scales, rtol=1e-4, atol=0)
    of_made, of_wanted = (each.values.cpu().float() * each.scales.cpu() for each in (made, wanted))
    assert (of_made - of_wanted).norm() < 0.01 * of_wanted.norm()


@pytest.mark.gpu
def test_gelu_in_the_products_last_step_is_the_one_by_tanh() -> None:
    rows, weight, bias = torch.randn(50, 64), torch.randn(128, 64), torch.randn(128)
    made = gelu_of_linear(rows.cuda(), weight.cuda(), bias.cuda())
    torch.testing.assert_close(made.cpu(), gelu_of_linear(rows, weight, bias), atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 4])
def test_captured_steps_are_the_plain_steps(tiny: Path, count: int) -> None:
    dit = make_dit(tiny, "cuda")
    drawn = noise(count)
    layout = table([-1, *range(count - 1)], [*range(1, count), -1], [24] * count, [-1] * (count - 1) + [1])
    plain = solve(dit, drawn, layout)
    kept = dit.store[:, :, 1].clone()
    captured = Flow(dit, dit.store.device, (2, 4))
    for _ in range(2):  # the second batch finds what the first left behind
        dit.store.zero_()
        torch.testing.assert_close(solve(dit, drawn, layout, captured), plain, atol=1e-5, rtol=0)
        torch.testing.assert_close(dit.store[:, :, 1], kept, atol=1e-5, rtol=0)
