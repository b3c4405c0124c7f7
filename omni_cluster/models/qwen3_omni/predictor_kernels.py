"""The predictor's kernels on CUDA beside those of any decoder: attention of a frame's codes, and drawing one of them.

Same arithmetic as `predictor`'s, up to the order of sums. PyTorch would take thirty kernels for what is one here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_cluster.kernels.decoder_kernels import _wait, launch_options

WARPS = 4
OUTSIDE = tl.constexpr(float("-inf"))


@triton.jit
def _turned(place, gain, cos, sin, column, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of a head, normed and turned; rounded where `normed` and `_turned` of the predictor round."""
    dtype = gain.dtype.element_ty
    first = tl.load(place + column).to(tl.float32)
    second = tl.load(place + HALF + column).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / DIM + eps)
    first = (first * scale).to(dtype).to(tl.float32) * tl.load(gain + column).to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * tl.load(gain + HALF + column).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit(do_not_specialize=["position", "num_requests"])
def _attend(
    qkv,
    gains,
    turns,
    kept,
    out,
    position,
    num_requests,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    POSITIONS: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A request's query heads of one head of keys: program `(request, head of keys)`."""
    HALF: tl.constexpr = DIM // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, whole, seen = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, PADDED)
    cos = tl.load(turns + position * HALF + column)
    sin = tl.load(turns + (POSITIONS + position) * HALF + column)
    keys = kept + (request * KV_HEADS + kv_head) * POSITIONS * DIM
    values = keys + num_requests.to(tl.int64) * KV_HEADS * POSITIONS * DIM
    # Those before this position are a whole pass old; past the L1 cache, which may hold older ones.
    before, own = (seen < position)[:, None], (seen == position)[:, None]
    places = seen[:, None] * DIM
    old_k1 = tl.load(keys + places + column[None, :], before, 0.0, cache_modifier=".cg")
    old_k2 = tl.load(keys + places + HALF + column[None, :], before, 0.0, cache_modifier=".cg")
    old_v = tl.load(values + places + whole[None, :], before, 0.0, cache_modifier=".cg")
    _wait(OVERLAP)
    row = qkv + request * (HEADS + 2 * KV_HEADS) * DIM
    key_head = HEADS + kv_head
    k1, k2 = _turned(row + key_head * DIM, gains + key_head * DIM, cos, sin, column, eps, DIM, HALF)
    v = tl.load(row + (key_head + KV_HEADS) * DIM + whole)
    tl.store(keys + position * DIM + column, k1)
    tl.store(keys + position * DIM + HALF + column, k2)
    tl.store(values + position * DIM + whole, v)
    all_k1 = tl.where(own, k1[None, :], old_k1).to(tl.float32)
    all_k2 = tl.where(own, k2[None, :], old_k2).to(tl.float32)
    all_v = tl.where(own, v[None, :], old_v).to(tl.float32)
    for number in tl.static_range(GROUP):
        head = kv_head * GROUP + number
        q1, q2 = _turned(row + head * DIM, gains + head * DIM, cos, sin, column, eps, DIM, HALF)
        scores = tl.sum(all_k1 * q1.to(tl.float32)[None, :], 1) + tl.sum(all_k2 * q2.to(tl.float32)[None, :], 1)
        scores = tl.where(seen <= position, scores * scale, OUTSIDE)
        weights = tl.exp(scores - tl.max(scores, 0))
        made = tl.sum(all_v * (weights / tl.sum(weights, 0))[:, None], 0)
        tl.store(out + (request * HEADS + head) * DIM + whole, made.to(out.dtype.element_ty))


@triton.jit
def _ordered(logit):
    """As unsigned integers in the order of the floats."""
    bits = logit.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ (-2147483647 - 1))
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _least_with(order, weight, wanted, BITS: tl.constexpr):
    """The highest bound whose elements of that `order` and above weigh at least `wanted`."""
    bound = tl.zeros([1], tl.uint32)
    step = tl.full([1], 1, tl.uint32) << 31
    for _ in range(BITS):
        higher = bound | step
        weighs = tl.sum(tl.where(order >= higher, weight, 0.0), 0)
        bound = tl.where(weighs >= wanted, higher, bound)
        step = step >> 1
    return bound


@triton.jit(do_not_specialize=["number", "noise_step", "codes_step"])
def _draw(
    logits,
    greedy,
    noise,
    table,
    codes,
    entering,
    number,
    noise_step,
    codes_step,
    top_p,
    CODES: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A request's code, and the code's embedding: program `(request,)`."""
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    there = place < CODES
    own_noise = tl.load(noise + request * noise_step + place, there, 1.0)
    is_greedy = tl.load(greedy + request)
    _wait(OVERLAP)
    logit = tl.load(logits + request * CODES + place, there, OUTSIDE).to(tl.float32)
    # Logits of 16 bits differ in the upper ones alone.
    BITS: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth
    order, highest = _ordered(logit), tl.max(logit, 0)
    likely = tl.exp(logit - highest)
    last = tl.min(tl.where(order >= _least_with(order, tl.where(there, 1.0, 0.0), TOP, BITS), logit, float("inf")), 0)
    # As many of those that equal the last one as have a place among the `TOP`.
    above = logit > last
    equals = TOP - tl.sum(tl.where(above, 1.0, 0.0), 0)
    total = tl.sum(tl.where(above, likely, 0.0), 0) + equals * tl.exp(last - highest)
    chance = tl.where(order >= _least_with(order, likely, top_p * total, BITS), likely, 0.0).to(tl.float64)
    code = tl.where(is_greedy, tl.argmax(logit, 0), tl.argmax(chance / own_noise, 0)).to(tl.int64)
    tl.store(codes + request * codes_step + number, code)
    column = tl.arange(0, PADDED_WIDTH)
    inside = column < WIDTH
    tl.store(entering + request * WIDTH + column, tl.load(table + code * WIDTH + column, inside, 0.0), inside)


def attend(
    qkv: torch.Tensor,
    gains: torch.Tensor,
    turns: torch.Tensor,
    kept: torch.Tensor,
    position: int,
    eps: float,
    *,
    overlap: bool,
) -> torch.Tensor:
    """`qkv` `[n, (heads + 2 * kv_heads) * D]` of the codes at `position` -> `[n, heads * D]`.

    `gains` `[heads + kv_heads, D]` of the norms; `turns` float32 `[2, positions, D / 2]`; `kept` `[2, n, kv_heads,
    positions, D]`: keys and values before `position`, where those of it are put.
    """
    _, n, kv_heads, positions, dim = kept.shape
    heads = len(gains) - kv_heads
    out = qkv.new_empty(n, heads * dim)
    _attend[(n, kv_heads)](
        qkv, gains, turns, kept, out, position, n, eps, dim**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, POSITIONS=positions, PADDED=triton.next_power_of_2(positions),
        OVERLAP=overlap, num_warps=WARPS, **launch_options(overlap),
    )  # fmt: skip
    return out


def draw(
    logits: torch.Tensor,
    greedy: torch.Tensor,
    noise: torch.Tensor,
    table: torch.Tensor,
    codes: torch.Tensor,
    number: int,
    top: tuple[int, float],
    *,
    overlap: bool,
) -> torch.Tensor:
    """Puts a code of each request into `codes` int64 `[n, Q - 1]` at `number`; returns their embeddings `[n, H]`.

    `logits` `[n, codes]`, `noise` float64 `[n, codes]`, each request's next to each other; `top`: see `drawn`.
    """
    n, num_codes = logits.shape
    entering = table.new_empty(n, table.shape[1])
    _draw[(n,)](
        logits, greedy, noise, table, codes, entering, number, noise.stride(0), codes.stride(0), top[1],
        CODES=num_codes, PADDED=triton.next_power_of_2(num_codes), TOP=min(top[0], num_codes),
        WIDTH=table.shape[1], PADDED_WIDTH=triton.next_power_of_2(table.shape[1]),
        OVERLAP=overlap, num_warps=WARPS, **launch_options(overlap),
    )  # fmt: skip
    return entering
