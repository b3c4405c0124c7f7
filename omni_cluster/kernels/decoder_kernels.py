"""A Qwen2 decoder's kernels on CUDA for steps of one token a request: five a layer, two more for several rows.

Same arithmetic as vLLM's modules, up to the order of sums. A step reads every weight once and computes little, so
with few rows each kernel starts while the one before it ends (programmatic dependent launch) and fetches its weights
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from omni_cluster.kernels.decoder_tiles import (
    GATE_UP_TILES,
    KEY_SPLITS,
    LINEAR_ADD_TILES,
    QKV_TILES,
    KeySplits,
    Tiles,
    tiles_of_nearest,
)

MAX_REQUESTS = 64
# One for each block of features of a product that is split, or for each request and key head.
NUM_COUNTERS = 4096


class Weight(NamedTuple):
    """`values` `[features, width]` as the activations, or of e4m3 with float32 `scales`, one of all or of each feature.

    e4m3 halves what a step reads. Activations are not rounded to it.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def scale_step(self) -> int | None:
        """From one feature's scale to the next one's; None without scales."""
        return None if self.scales is None else int(self.scales.numel() > 1)


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    """Until the kernels before this one have ended. Before it only what no kernel of the step writes may be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the next kernel relies on it that all but its predecessor have ended.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fetch(rows, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    """Asks for the first `COLUMNS` of `rows` into the L2 cache, each row by `PIECES` threads."""
    pieces = rows[:, None] + tl.arange(0, PIECES)[None, :] * (COLUMNS // PIECES)
    size = tl.full(pieces.shape, COLUMNS // PIECES * rows.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [pieces, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _is_last(counter, expected):
    """Whether the other programs of `expected` have stored their parts; the counter is zero again afterwards."""
    tl.debug_barrier()  # all threads' parts are stored before the one thread counts
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _normed(x, scale, gain):
    """Rounded after the scale and after the gain, as vLLM's."""
    x = (x.to(tl.float32) * scale).to(gain.dtype).to(tl.float32)
    return (x * gain.to(tl.float32)).to(gain.dtype)


@triton.jit
def _as(w, dtype: tl.constexpr):
    """e4m3 in another dtype, exactly; what is in it already is left alone."""
    if w.dtype != dtype:
        w = w.to(tl.float32).to(dtype)
    return w


@triton.jit
def _scaled(y, scales, feature, inside, STEP: tl.constexpr):
    """Times the scale of each feature, or of all of them where `STEP` is 0; as it is where the weight has no scales."""
    if STEP is not None:
        y *= tl.load(scales + feature * STEP, inside, 0.0)
    return y


@triton.jit
def _silu_and_multiply(gate, up, dtype: tl.constexpr):
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _norm_linear_of_one(
    residual,
    gain,
    weight,
    scales,
    bias,
    out,
    num_features,
    eps,
    WIDTH: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    GATED: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    inside, there = feature < num_features, column < WIDTH
    tile = feature[:, None] * WIDTH + column[None, :]
    in_tile = inside[:, None] & there[None, :]
    w = tl.load(weight + tile, in_tile, 0.0)
    if GATED:
        w_up = tl.load(weight + num_features * WIDTH + tile, in_tile, 0.0)
    else:
        b = tl.load(bias + feature, inside, 0.0).to(tl.float32)
    g = tl.load(gain + column, there, 0.0)
    _wait(OVERLAP)
    x = tl.load(residual + column, there, 0.0).to(tl.float32)
    x = _normed(x, tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps), g).to(tl.float32)
    y = _scaled(tl.sum(w.to(tl.float32) * x[None, :], 1), scales, feature, inside, SCALE_STEP)
    if GATED:
        y_up = tl.sum(w_up.to(tl.float32) * x[None, :], 1)
        y_up = _scaled(y_up, scales, num_features + feature, inside, SCALE_STEP)
        y = _silu_and_multiply(y, y_up, out.dtype.element_ty)
    else:
        y += b
    tl.store(out + feature, y.to(out.dtype.element_ty), inside)


@triton.jit
def _norm(residual, gain, out, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    there = column < WIDTH
    place = tl.program_id(0) * WIDTH + column
    g = tl.load(gain + column, there, 0.0)
    _wait(OVERLAP)
    x = tl.load(residual + place, there, 0.0).to(tl.float32)
    tl.store(out + place, _normed(x, tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps), g), there)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    num_features,
    WIDTH: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < num_features
    row = tl.arange(0, ROWS)
    present = row < num_rows
    up = weight + num_features * WIDTH
    if AHEAD > 0:
        own = tl.minimum(feature, num_features - 1) * WIDTH
        _fetch(weight + own, AHEAD, PIECES)
        if GATED:
            _fetch(up + own, AHEAD, PIECES)
    _wait(OVERLAP)
    y = tl.zeros([FEATURES, ROWS], tl.float32)
    y_up = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        there = column < WIDTH
        part = tl.load(x + row[:, None] * WIDTH + column[None, :], present[:, None] & there[None, :], 0.0)
        tile = feature[:, None] * WIDTH + column[None, :]
        in_tile = inside[:, None] & there[None, :]
        y = tl.dot(_as(tl.load(weight + tile, in_tile, 0.0), part.dtype), tl.trans(part), y)
        if GATED:
            y_up = tl.dot(_as(tl.load(up + tile, in_tile, 0.0), part.dtype), tl.trans(part), y_up)
    y = _scaled(y, scales, feature[:, None], inside[:, None], SCALE_STEP)
    if GATED:
        y_up = _scaled(y_up, scales, num_features + feature[:, None], inside[:, None], SCALE_STEP)
        y = _silu_and_multiply(y, y_up, out.dtype.element_ty)
    else:
        y += tl.load(bias + feature, inside, 0.0).to(tl.float32)[:, None]
    place = row[None, :] * num_features + feature[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), inside[:, None] & present[None, :])


def norm_linear(
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor,
    *,
    overlap: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """RMS norm of `residual` `[n, width]`, times `weight` `[features, width]`, plus `bias` -> `[n, features]`."""
    tiles = tiles or tiles_of_nearest(QKV_TILES, weight.values)[padded_rows(residual.shape[0])]
    return _launch_norm_linear(residual, norm_weight, eps, weight, bias, weight.values.shape[0], overlap, tiles)


def norm_gate_up(
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    *,
    overlap: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """RMS norm of `residual` `[n, width]`, times `weight` `[2 * features, width]`, silu(first) * second half."""
    tiles = tiles or tiles_of_nearest(GATE_UP_TILES, weight.values)[padded_rows(residual.shape[0])]
    return _launch_norm_linear(residual, norm_weight, eps, weight, None, weight.values.shape[0] // 2, overlap, tiles)


def _launch_norm_linear(
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None,
    num_features: int,
    overlap: bool,
    tiles: Tiles,
) -> torch.Tensor:
    num_rows, width = residual.shape
    out = torch.empty(num_rows, num_features, dtype=residual.dtype, device=residual.device)
    padded = padded_rows(num_rows)
    options = {"OVERLAP": overlap, **launch_options(overlap)}
    grid = (triton.cdiv(num_features, tiles.features),)
    weights = weight.values, weight.scales, bias
    columns = triton.next_power_of_2(width)
    if padded == 1:
        _norm_linear_of_one[grid](
            residual,
            norm_weight,
            *weights,
            out,
            num_features,
            eps,
            WIDTH=width,
            SCALE_STEP=weight.scale_step,
            GATED=bias is None,
            FEATURES=tiles.features,
            COLUMNS=columns,
            num_warps=tiles.warps,
            **options,
        )
        return out
    normed = torch.empty_like(residual)
    _norm[(num_rows,)](
        residual, norm_weight, normed, eps, WIDTH=width, COLUMNS=columns, num_warps=NORM_WARPS, **options
    )
    _linear[grid](
        normed,
        *weights,
        out,
        num_rows,
        num_features,
        WIDTH=width,
        SCALE_STEP=weight.scale_step,
        GATED=bias is None,
        ROWS=padded,
        FEATURES=tiles.features,
        COLUMNS=tiles.columns,
        STAGES=tiles.stages,
        **fetch_options(tiles, width, weight.values, overlap),
        num_warps=tiles.warps,
        **options,
    )
    return out


@triton.jit
def _add(y, residual, out, place, inside):
    y = y.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), inside)


@triton.jit
def _add_sum_of_splits(y, residual, out, parts, counters, place, inside, out_size, SPLITS: tl.constexpr):
    """The last program of a block of features adds all parts, always in the same order."""
    if SPLITS == 1:
        _add(y, residual, out, place, inside)
    else:
        tl.store(parts + tl.program_id(1) * out_size + place, y, inside)
        if _is_last(counters + tl.program_id(0), SPLITS):
            total = tl.zeros_like(y)
            for split in tl.static_range(SPLITS):
                # Past the L1 cache, which does not see other programs' stores.
                total += tl.load(parts + split * out_size + place, inside, 0.0, cache_modifier=".cg")
            _add(total, residual, out, place, inside)


@triton.jit
def _linear_add_of_one(
    x,
    weight,
    scales,
    residual,
    out,
    parts,
    counters,
    num_features,
    WIDTH: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < num_features
    column = tl.program_id(1) * SPAN + tl.arange(0, COLUMNS)
    rows = weight + feature[:, None] * WIDTH
    end = tl.minimum(tl.program_id(1) * SPAN + SPAN, WIDTH)
    w = tl.load(rows + column[None, :], inside[:, None] & (column < end)[None, :], 0.0)
    _wait(OVERLAP)
    total = tl.zeros([FEATURES, COLUMNS], tl.float32)
    for _ in range(0, SPAN, COLUMNS):
        total += w.to(tl.float32) * tl.load(x + column, column < end, 0.0).to(tl.float32)[None, :]
        column += COLUMNS
        w = tl.load(rows + column[None, :], inside[:, None] & (column < end)[None, :], 0.0)
    y = _scaled(tl.sum(total, 1), scales, feature, inside, SCALE_STEP)
    _add_sum_of_splits(y, residual, out, parts, counters, feature, inside, num_features, SPLITS)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_add(
    x,
    weight,
    scales,
    residual,
    out,
    parts,
    counters,
    num_rows,
    num_features,
    WIDTH: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < num_features
    row = tl.arange(0, ROWS)
    present = row < num_rows
    first = tl.program_id(1) * SPAN
    if AHEAD > 0:
        own = tl.minimum(feature, num_features - 1) * WIDTH + tl.minimum(first, WIDTH - AHEAD)
        _fetch(weight + own, AHEAD, PIECES)
    _wait(OVERLAP)
    y = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        column = first + start + tl.arange(0, COLUMNS)
        there = column < WIDTH
        part = tl.load(x + row[:, None] * WIDTH + column[None, :], present[:, None] & there[None, :], 0.0)
        tile = feature[:, None] * WIDTH + column[None, :]
        w = _as(tl.load(weight + tile, inside[:, None] & there[None, :], 0.0), part.dtype)
        y = tl.dot(w, tl.trans(part), y)
    y = _scaled(y, scales, feature[:, None], inside[:, None], SCALE_STEP)
    place = row[None, :] * num_features + feature[:, None]
    there = inside[:, None] & present[None, :]
    _add_sum_of_splits(y, residual, out, parts, counters, place, there, num_rows * num_features, SPLITS)


def linear_add(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    counters: torch.Tensor,
    *,
    overlap: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`x` `[n, width]` times `weight` `[features, width]`, plus `residual` `[n, features]`, which is left as it is.

    `counters` `[NUM_COUNTERS]` int32 is zero before and after.
    """
    num_rows, width = x.shape
    num_features = weight.values.shape[0]
    padded = padded_rows(num_rows)
    tiles = tiles or tiles_of_nearest(LINEAR_ADD_TILES, weight.values)[padded]
    span = triton.cdiv(triton.cdiv(width, tiles.splits), tiles.columns) * tiles.columns
    splits = triton.cdiv(width, span)
    out = torch.empty_like(residual)
    parts = x.new_empty(splits, num_rows, num_features, dtype=torch.float32) if splits > 1 else residual
    tensors = x, weight.values, weight.scales, residual, out, parts, counters
    grid = (triton.cdiv(num_features, tiles.features), splits)
    if padded == 1:
        _linear_add_of_one[grid](
            *tensors,
            num_features,
            WIDTH=width,
            SCALE_STEP=weight.scale_step,
            SPAN=span,
            SPLITS=splits,
            FEATURES=tiles.features,
            COLUMNS=tiles.columns,
            OVERLAP=overlap,
            num_warps=tiles.warps,
            **launch_options(overlap),
        )
    else:
        _linear_add[grid](
            *tensors,
            num_rows,
            num_features,
            WIDTH=width,
            SCALE_STEP=weight.scale_step,
            SPAN=span,
            SPLITS=splits,
            ROWS=padded,
            FEATURES=tiles.features,
            COLUMNS=tiles.columns,
            STAGES=tiles.stages,
            **fetch_options(tiles, span, weight.values, overlap),
            OVERLAP=overlap,
            num_warps=tiles.warps,
            **launch_options(overlap),
        )
    return out


@triton.jit
def _rotary_of_step(
    positions,
    cache,
    cos,
    sin,
    axis_stride,
    num_positions,
    TIME: tl.constexpr,
    HEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    there = column < HALF
    axis = (column >= TIME).to(tl.int32) + (column >= TIME + HEIGHT).to(tl.int32)
    _wait(OVERLAP)
    position = tl.load(positions + axis * axis_stride + row, there, 0)
    # A padded row's position may be anything.
    place = tl.minimum(tl.maximum(position, 0), num_positions - 1) * (2 * HALF) + column
    tl.store(cos + row * HALF + column, tl.load(cache + place, there, 0.0).to(cos.dtype.element_ty), there)
    tl.store(sin + row * HALF + column, tl.load(cache + place + HALF, there, 0.0).to(sin.dtype.element_ty), there)


def rotary_of_step(
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    sections: Sequence[int],
    dtype: torch.dtype,
    *,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`positions` `[3, n]`, `cos_sin_cache` `[max, head_dim]` -> cosines and sines `[n, head_dim // 2]` in `dtype`."""
    n, half = positions.shape[1], cos_sin_cache.shape[1] // 2
    cos, sin = torch.empty(2, n, half, dtype=dtype, device=positions.device)
    _rotary_of_step[(n,)](
        positions,
        cos_sin_cache,
        cos,
        sin,
        positions.stride(0),
        cos_sin_cache.shape[0],
        TIME=sections[0],
        HEIGHT=sections[1],
        HALF=half,
        COLUMNS=triton.next_power_of_2(half),
        OVERLAP=overlap,
        num_warps=2,
        **launch_options(overlap),
    )
    return cos, sin


@triton.jit
def _rotated(rows, there, cos, sin, HALF: tl.constexpr):
    """Both halves of heads, rotated and rounded; `rows`: pointers to the first half."""
    first = tl.load(rows, there, 0.0)
    second = tl.load(rows + HALF, there, 0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _load_blocks(table, position, end, PAGE: tl.constexpr):
    return tl.load(table + position // PAGE, position < end, 0, cache_modifier=".cg").to(tl.int64)


@triton.jit
def _load_keys(cache, block, position, end, block_stride, place_stride, PAGE: tl.constexpr, HALF: tl.constexpr):
    """Keys in halves and values at `position`, zero from `end` on; past the L1 cache, which may hold older ones."""
    half = tl.arange(0, HALF)
    there = position < end
    rows = cache + block * block_stride + (position % PAGE) * place_stride
    k1 = tl.load(rows[:, None] + half[None, :], there[:, None], 0.0, cache_modifier=".cg")
    k2 = tl.load(rows[:, None] + HALF + half[None, :], there[:, None], 0.0, cache_modifier=".cg")
    column = 2 * HALF + tl.arange(0, 2 * HALF)
    v = tl.load(rows[:, None] + column[None, :], there[:, None], 0.0, cache_modifier=".cg")
    return k1, k2, v


@triton.jit
def _keep(cache, slot, k1, k2, v, block_stride, place_stride, PAGE: tl.constexpr, HALF: tl.constexpr):
    half, column = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    row = cache + (slot // PAGE) * block_stride + (slot % PAGE) * place_stride
    tl.store(row + half, k1)
    tl.store(row + HALF + half, k2)
    tl.store(row + 2 * HALF + column, v)


@triton.jit
def _dot_halves(a1, a2, b1, b2):
    return tl.sum(a1.to(tl.float32) * b1.to(tl.float32) + a2.to(tl.float32) * b2.to(tl.float32), 1)


@triton.jit
def _weigh(result, total, highest, scores, v):
    """Adds one tile of values to the softmax so far."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    fade = tl.exp(highest - higher)
    result = tl.dot(weights.to(v.dtype), v, result * fade[:, None])
    return result, total * fade + tl.sum(weights, 1), higher


@triton.jit
def _combine(
    parts, peaks, out, num_parts, GROUP: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr
):
    """`parts` `[splits, GROUP, 2 * HALF]`, `peaks` `[splits, GROUP, 2]`: highest score and sum of the weights."""
    part, head = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    column = tl.arange(0, 2 * HALF)
    there = (part < num_parts)[:, None] & (head < GROUP)[None, :]
    index = part[:, None] * GROUP + head[None, :]
    place = index[:, :, None] * (2 * HALF) + column[None, None, :]
    values = tl.load(parts + place, there[:, :, None], 0.0, cache_modifier=".cg")
    # The first part is always there; the padding's sums must not be zero.
    peak = tl.load(peaks + index * 2, there, -1e30, cache_modifier=".cg")
    total = tl.load(peaks + index * 2 + 1, there, 1.0, cache_modifier=".cg")
    share = tl.exp(peak - tl.max(peak, 0)[None, :])
    y = tl.sum(values * share[:, :, None], 0) / tl.sum(total * share, 0)[:, None]
    rows = out + head[:, None] * (2 * HALF) + column[None, :]
    tl.store(rows, y.to(out.dtype.element_ty), (head < GROUP)[:, None])


@triton.jit
def _attend(
    qkv,
    cos,
    sin,
    cache,
    block_table,
    seq_lens,
    slot_mapping,
    out,
    parts,
    peaks,
    counters,
    scale,
    longest,
    table_stride,
    block_stride,
    head_stride,
    place_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half, column = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    key, head = tl.arange(0, KEYS), tl.arange(0, 16)  # 16: the fewest rows of a product
    cache += kv_head.to(tl.int64) * head_stride
    table = block_table + request * table_stride
    # The new token's key is not read from the cache: the first split has it at hand.
    length = tl.load(seq_lens + request, cache_modifier=".cg")
    length = tl.minimum(tl.maximum(length - 1, 0), longest)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), KEYS), 1) * KEYS
    num_parts = tl.maximum(tl.cdiv(length, span), 1)
    first = split * span
    end = tl.minimum(first + span, length)
    block = _load_blocks(table, first + key, end, PAGE)
    k1, k2, v = _load_keys(cache, block, first + key, end, block_stride, place_stride, PAGE, HALF)
    block = _load_blocks(table, first + KEYS + key, end, PAGE)
    slot = tl.load(slot_mapping + request, cache_modifier=".cg")
    _wait(OVERLAP)
    if split < num_parts:
        cosine = tl.load(cos + request * HALF + half).to(tl.float32)
        sine = tl.load(sin + request * HALF + half).to(tl.float32)
        row = qkv + request * (GROUP + 2) * KV_HEADS * 2 * HALF
        in_group = head < GROUP
        heads = row + (kv_head * GROUP + head) * 2 * HALF
        q1, q2 = _rotated(heads[:, None] + half[None, :], in_group[:, None], cosine[None, :], sine[None, :], HALF)
        highest = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        result = tl.zeros([16, 2 * HALF], tl.float32)
        if split == 0:
            new_key = row + (GROUP * KV_HEADS + kv_head) * 2 * HALF
            n1, n2 = _rotated(new_key + half, half < HALF, cosine, sine, HALF)
            new_value = tl.load(new_key + KV_HEADS * 2 * HALF + column)
            highest = _dot_halves(q1, q2, n1[None, :], n2[None, :]) * scale
            total = tl.full([16], 1.0, tl.float32)
            result += new_value.to(tl.float32)[None, :]
            if slot >= 0:
                _keep(cache, slot, n1, n2, new_value, block_stride, place_stride, PAGE, HALF)
        for start in range(first, end, KEYS):
            following = start + KEYS + key
            next_k1, next_k2, next_v = _load_keys(cache, block, following, end, block_stride, place_stride, PAGE, HALF)
            block = _load_blocks(table, following + KEYS, end, PAGE)
            scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
            scores = tl.where((start + key < end)[None, :], scores, float("-inf"))
            result, total, highest = _weigh(result, total, highest, scores, v)
            k1, k2, v = next_k1, next_k2, next_v
        group = request * KV_HEADS + kv_head
        own, own_out = group * SPLITS * GROUP, group * GROUP * 2 * HALF
        index = own + split * GROUP + head
        tl.store(parts + index[:, None] * (2 * HALF) + column[None, :], result, in_group[:, None])
        tl.store(peaks + index * 2, highest, in_group)
        tl.store(peaks + index * 2 + 1, total, in_group)
        if _is_last(counters + group, num_parts):
            parts += own * 2 * HALF
            _combine(parts, peaks + own * 2, out + own_out, num_parts, GROUP, PADDED_GROUP, SPLITS, HALF)


def attend(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    counters: torch.Tensor,
    *,
    overlap: bool,
    splits: KeySplits | None = None,
) -> torch.Tensor:
    """One new token a request over its keys in vLLM's paged cache, its own included, which is stored there.

    `qkv` `[n, (heads + 2 * kv_heads) * head_dim]`, `cos`, `sin` `[n, head_dim // 2]`, `kv_cache` `[blocks, kv_heads,
    page, 2 * head_dim]` (any strides but the last), `block_table` `[n, blocks]` and `seq_lens` `[n]` int32 (the new
    token counted), `slot_mapping` `[n]` int64 (negative: store nothing), `counters` `[NUM_COUNTERS]` int32, zero
    before and after -> `[n, heads * head_dim]`. Of a padded row the result is finite.
    """
    n, half = qkv.shape[0], cos.shape[1]
    _, kv_heads, page, _ = kv_cache.shape
    group = qkv.shape[1] // (2 * half) // kv_heads - 2
    splits = splits or KEY_SPLITS[triton.next_power_of_2(n)]
    out = torch.empty(n, group * kv_heads * 2 * half, dtype=qkv.dtype, device=qkv.device)
    parts = torch.empty(n * kv_heads * splits.splits * group, 2 * half, device=qkv.device)
    peaks = torch.empty(parts.shape[0], 2, device=qkv.device)
    _attend[(n, kv_heads, splits.splits)](
        qkv,
        cos,
        sin,
        kv_cache,
        block_table,
        seq_lens,
        slot_mapping,
        out,
        parts,
        peaks,
        counters,
        scale,
        block_table.shape[1] * page,
        block_table.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED_GROUP=triton.next_power_of_2(group),
        HALF=half,
        PAGE=page,
        SPLITS=splits.splits,
        KEYS=splits.keys,
        OVERLAP=overlap,
        num_warps=splits.warps,
        **launch_options(overlap),
    )
    return out


def padded_rows(num_rows: int) -> int:
    """A single row is multiplied and summed; more are a matrix product's, which has at least 16."""
    return 1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows))


def can_overlap(hidden: torch.Tensor) -> bool:
    """Whether the kernels of a step over `hidden` `[n, width]` start before those before them have ended.

    With more values the programs that start early crowd on a few multiprocessors, which costs more than it saves. Not
    every card can do it.
    """
    return (
        hidden.is_cuda
        and padded_rows(hidden.shape[0]) * hidden.shape[1] <= OVERLAPPED_VALUES
        and torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    )


def launch_options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


def fetch_options(tiles: Tiles, span: int, weight: torch.Tensor, overlap: bool) -> dict[str, int]:
    """Of the columns that `tiles` asks for ahead: each thread's piece begins and ends at 16 bytes."""
    pieces, width = max(1, 32 * tiles.warps // tiles.features), weight.shape[1]
    unit = 16 // weight.element_size()
    aligned = overlap and width % unit == 0 and span % unit == 0
    columns = min(tiles.ahead, span, width) if aligned else 0
    return {"AHEAD": columns // (unit * pieces) * (unit * pieces), "PIECES": pieces}


# The 7B talker's 16 requests, and one of its thinker, whose steps take 4 % longer with overlap from two on.
OVERLAPPED_VALUES = 16 * 896
NORM_WARPS = 4
