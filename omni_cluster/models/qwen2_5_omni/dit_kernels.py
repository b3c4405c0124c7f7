"""The DiT's two fused steps on CUDA: gated residual with modulated norm, and attention of packed blocks.

Same arithmetic as the plain PyTorch in `dit.py`, which is what their tests compare them with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from omni_cluster.kernels.float8_kernels import store_quantized

if TYPE_CHECKING:
    from omni_cluster.models.qwen2_5_omni.dit import PackedBlocks


@triton.jit
def add_and_norm_row(
    row,
    hidden,
    out,
    has_out,
    gate,
    scale,
    shift,
    points,
    normed,
    scales,
    num_blocks,
    gate_stride,
    norm_stride,
    width,
    eps,
    SIZE: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `add_and_norm`. All that other programs may have stored is loaded past the L1 cache."""
    point = tl.load(points + row // SIZE % num_blocks)
    columns = tl.arange(0, BLOCK)
    there = columns < width
    x = tl.load(hidden + row * width + columns, there, 0.0, cache_modifier=".cg")
    added = tl.load(out + row * width + columns, there & has_out, 0.0, cache_modifier=".cg").to(tl.float32)
    x += tl.load(gate + point * gate_stride + columns, there & has_out, 0.0) * added
    tl.store(hidden + row * width + columns, x, there & has_out)
    scale_row = tl.load(scale + point * norm_stride + columns, there, 0.0)
    shift_row = tl.load(shift + point * norm_stride + columns, there, 0.0)
    centred = tl.where(there, x - tl.sum(x, 0) / width, 0.0)
    x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    y = x * (1.0 + scale_row) + shift_row
    if FLOAT8:
        store_quantized(row, y, normed, scales, width, columns, there)
    else:
        tl.store(normed + row * width + columns, y.to(normed.dtype.element_ty), there)


# Not specialized, here and below: a batch of any number of blocks shares what was compiled.
@triton.jit(do_not_specialize=["points", "num_blocks"])
def _add_and_norm(
    hidden,
    out,
    gate,
    scale,
    shift,
    points,
    normed,
    scales,
    num_blocks,
    gate_stride,
    norm_stride,
    width,
    eps,
    SIZE: tl.constexpr,
    HAS_OUT: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    add_and_norm_row(
        tl.program_id(0),
        hidden,
        out,
        HAS_OUT,
        gate,
        scale,
        shift,
        points,
        normed,
        scales,
        num_blocks,
        gate_stride,
        norm_stride,
        width,
        eps,
        SIZE,
        FLOAT8,
        BLOCK,
    )


def add_and_norm(
    hidden: torch.Tensor,
    out: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    point: torch.Tensor,
    size: int,
    eps: float,
    normed: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """`hidden` `[2 * N * size, width]` float32 += gate * out, in place, if there is a gate; its modulated layer norm
    into `normed` of that shape. With `scales` float32 `[2 * N * size, 1]` that is float8, each row with its scale.

    `gate`, `scale`, `shift`: tables `[times, width]`, of which block n has row `point[n]`.
    """
    rows, width = hidden.shape
    _add_and_norm[(rows,)](
        hidden,
        out,
        scale if gate is None else gate,
        scale,
        shift,
        point,
        normed,
        normed if scales is None else scales,
        point.shape[0],
        0 if gate is None else gate.stride(0),
        scale.stride(0),
        width,
        eps,
        SIZE=size,
        HAS_OUT=gate is not None,
        FLOAT8=scales is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _load_rotated(rows, there, head, angles, first_place, size, table_length, HALF: tl.constexpr):
    """Both halves of one head of 24 rows; `rows`: pointers to their first column; the first head is rotated."""
    half = tl.arange(0, HALF)
    place = first_place + tl.arange(0, there.shape[0])
    first = tl.load(rows[:, None] + half[None, :], there[:, None], 0.0, cache_modifier=".cg")
    second = tl.load(rows[:, None] + HALF + half[None, :], there[:, None], 0.0, cache_modifier=".cg")
    if head == 0:
        cos = tl.load(angles + place[:, None] * HALF + half[None, :], there[:, None], 1.0)
        sin = tl.load(angles + (table_length + place[:, None]) * HALF + half[None, :], there[:, None], 0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
    return first, second


@triton.jit
def _scores(q1, q2, k1, k2, there, scale, PRECISION: tl.constexpr):
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) + tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
    return tl.where(there[None, :], scores * scale, float("-inf"))


@triton.jit
def _weigh(result, total, scores, highest, values, PRECISION: tl.constexpr):
    weights = tl.exp(scores - highest[:, None])
    result += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return result, total + tl.sum(weights, 1)


@triton.jit
def attend_block(
    place,
    head,
    qkv,
    attended,
    angles,
    previous,
    following,
    length,
    store,
    point,
    num_blocks,
    store_point_stride,
    scale,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of one block; `place`: the block, behind all blocks if it is the unguided side's."""
    inner = 2 * HALF * HEADS
    side = place // num_blocks  # guided or unguided
    block = place % num_blocks
    frame = tl.arange(0, PAD)
    column = tl.arange(0, 2 * HALF)
    there = frame < SIZE
    own_length = tl.load(length + block)
    own_length = tl.where(own_length == 0, SIZE, own_length)  # a block that only fills the batch

    rows = qkv + (place * SIZE + frame) * 3 * inner + head * 2 * HALF
    q1, q2 = _load_rotated(rows, there, head, angles, SIZE, SIZE, 3 * SIZE, HALF)
    k1, k2 = _load_rotated(rows + inner, there, head, angles, SIZE, SIZE, 3 * SIZE, HALF)
    scores = _scores(q1, q2, k1, k2, frame < own_length, scale, PRECISION)
    highest = tl.max(scores, 1)

    if BACK:
        before = tl.load(previous + block)
        in_batch = there & (before >= 0)
        in_store = there & (before <= -2)
        batch_rows = qkv + ((side * num_blocks + before) * SIZE + frame) * 3 * inner + inner + head * 2 * HALF
        slot = ((-2 - before) * 2 + side).to(tl.int64)
        slot_rows = (
            store + tl.load(point + block) * store_point_stride + (slot * SIZE + frame) * 2 * inner + head * 2 * HALF
        )
        b1, b2 = _load_rotated(batch_rows, in_batch, head, angles, 0, SIZE, 3 * SIZE, HALF)
        s1, s2 = _load_rotated(slot_rows, in_store, head, angles, 0, SIZE, 3 * SIZE, HALF)
        back_scores = _scores(q1, q2, b1 + s1, b2 + s2, in_batch | in_store, scale, PRECISION)
        highest = tl.maximum(highest, tl.max(back_scores, 1))
    if AHEAD:
        after = tl.load(following + block)
        after_length = tl.load(length + tl.maximum(after, 0))
        next_there = there & (after >= 0) & (frame < after_length)
        next_rows = qkv + ((side * num_blocks + after) * SIZE + frame) * 3 * inner + inner + head * 2 * HALF
        a1, a2 = _load_rotated(next_rows, next_there, head, angles, 2 * SIZE, SIZE, 3 * SIZE, HALF)
        next_scores = _scores(q1, q2, a1, a2, next_there, scale, PRECISION)
        highest = tl.maximum(highest, tl.max(next_scores, 1))

    result = tl.zeros([PAD, 2 * HALF], tl.float32)
    total = tl.zeros([PAD], tl.float32)
    v = tl.load((rows + 2 * inner)[:, None] + column[None, :], there[:, None], 0.0, cache_modifier=".cg")
    result, total = _weigh(result, total, scores, highest, v, PRECISION)
    if BACK:
        v = tl.load((batch_rows + inner)[:, None] + column[None, :], in_batch[:, None], 0.0, cache_modifier=".cg")
        v += tl.load((slot_rows + inner)[:, None] + column[None, :], in_store[:, None], 0.0, cache_modifier=".cg")
        result, total = _weigh(result, total, back_scores, highest, v, PRECISION)
    if AHEAD:
        v = tl.load((next_rows + inner)[:, None] + column[None, :], next_there[:, None], 0.0, cache_modifier=".cg")
        result, total = _weigh(result, total, next_scores, highest, v, PRECISION)
    out = attended + (place * SIZE + frame) * inner + head * 2 * HALF
    result = (result / total[:, None]).to(attended.dtype.element_ty)
    tl.store(out[:, None] + column[None, :], result, there[:, None])


@triton.jit(do_not_specialize=["previous", "following", "length", "point", "num_blocks"])
def _block_attention(
    qkv,
    attended,
    angles,
    previous,
    following,
    length,
    store,
    point,
    num_blocks,
    store_point_stride,
    scale,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    attend_block(
        tl.program_id(0),
        tl.program_id(1),
        qkv,
        attended,
        angles,
        previous,
        following,
        length,
        store,
        point,
        num_blocks,
        store_point_stride,
        scale,
        SIZE,
        PAD,
        HALF,
        HEADS,
        BACK,
        AHEAD,
        PRECISION,
    )


def block_attention(
    qkv: torch.Tensor,
    blocks: PackedBlocks,
    rotary: torch.Tensor,
    store: torch.Tensor | None,
    point: torch.Tensor,
    looks_ahead: bool,
    size: int,
    heads: int,
) -> torch.Tensor:
    """`qkv` `[2 * N * size, 3 * inner]` -> `[2 * N * size, inner]`; `point`: of each block; see `BlockDiT`."""
    num_blocks, inner = blocks.length.shape[0], qkv.shape[1] // 3
    attended = torch.empty(qkv.shape[0], inner, dtype=qkv.dtype, device=qkv.device)
    _block_attention[(2 * num_blocks, heads)](
        qkv,
        attended,
        rotary,
        blocks.previous,
        blocks.following,
        blocks.length,
        qkv if store is None else store,
        point,
        num_blocks,
        0 if store is None else store.stride(0),
        (inner // heads) ** -0.5,
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        HALF=inner // heads // 2,
        HEADS=heads,
        BACK=store is not None,
        AHEAD=looks_ahead,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=2,
    )
    return attended


@triton.jit
def keep_row(
    row,
    qkv,
    keep,
    store,
    point,
    num_blocks,
    store_point_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
):
    """Key and value of one row, if its block has a slot."""
    block = row // SIZE % num_blocks
    slot = tl.load(keep + block)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        there = column < 2 * INNER
        kept = tl.load(qkv + row * 3 * INNER + INNER + column, there, cache_modifier=".cg")
        side = row // SIZE // num_blocks
        kept_row = ((slot * 2 + side) * SIZE + row % SIZE).to(tl.int64)
        tl.store(store + tl.load(point + block) * store_point_stride + kept_row * 2 * INNER + column, kept, there)


@triton.jit(do_not_specialize=["keep", "point", "num_blocks"])
def _keep_blocks(
    qkv,
    keep,
    store,
    point,
    num_blocks,
    store_point_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
):
    keep_row(tl.program_id(0), qkv, keep, store, point, num_blocks, store_point_stride, SIZE, WIDTH, INNER)


def keep_blocks(qkv: torch.Tensor, keep: torch.Tensor, store: torch.Tensor, point: torch.Tensor, size: int) -> None:
    """Copies keys and values of each block that has a slot into `store` at the block's `point`."""
    inner = qkv.shape[1] // 3
    _keep_blocks[(2 * keep.shape[0] * size,)](
        qkv,
        keep,
        store,
        point,
        keep.shape[0],
        store.stride(0),
        SIZE=size,
        WIDTH=triton.next_power_of_2(2 * inner),
        INNER=inner,
    )
