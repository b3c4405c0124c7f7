"""All layers of one evaluation of the DiT as one kernel on CUDA, for steps of few blocks.

A layer is some eight kernels, which with few blocks have a few microseconds of work each: the first piece of a stream
is some 7,000 of them, and beside other processes on the card each waits for places among theirs. Here as many programs
as the card holds at once stay on it through all layers, and wait for each other between the phases of a layer. The
arithmetic is that of `BlockDiT.velocity`, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from omni_cluster.kernels.float8_kernels import gelu_by_tanh
from omni_cluster.models.qwen2_5_omni.dit_kernels import add_and_norm_row, attend_block, keep_row

if TYPE_CHECKING:
    from omni_cluster.models.qwen2_5_omni.dit import DiTLayer, PackedBlocks

LOOKS_BACK, LOOKS_AHEAD = 1, 2
"""Bits of a layer's kind."""
ROWS, FEATURES, NARROW, COLUMNS, STAGES, WARPS = 64, 64, 32, 128, 4, 4
"""A tile of a product: its rows, its features (NARROW where there are few in all), columns at a time, and Triton's
stages and warps."""
PROGRAMS = 96
"""Programs that stay on the card; fewer on a card of fewer multiprocessors."""


@triton.jit
def _wait_for_all(arrived, wanted, PROGRAMS: tl.constexpr):
    """Until `arrived` is `wanted`: what all programs stored before is there for each of them, past its L1 cache.

    One thread of a program counts and looks: were it all of them, they would wait for each other's looks.
    """
    if PROGRAMS > 1:
        tl.debug_barrier()  # all threads have stored before the one counts
        tl.inline_asm_elementwise(
            """{
            .reg .pred no;
            .reg .u32 thread;
            .reg .s64 count;
            mov.u32 thread, %tid.x;
            setp.ne.u32 no, thread, 0;
            @no bra end;
            red.release.gpu.global.add.u64 [$1], 1;
            look:
            ld.acquire.gpu.global.s64 count, [$1];
            setp.lt.s64 no, count, $2;
            @no bra look;
            end:
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [arrived, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    return wanted + PROGRAMS


@triton.jit
def _product(
    x,
    weight,
    bias,
    out,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """`x` `[num_rows, WIDTH]` times `weight` `[NUM_FEATURES, WIDTH]`, plus `bias`; tiles by turns."""
    across: tl.constexpr = (NUM_FEATURES + FEATURES - 1) // FEATURES
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, PROGRAMS):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        feature = tile % across * FEATURES + tl.arange(0, FEATURES)
        present, inside = row < num_rows, feature < NUM_FEATURES
        y = tl.zeros([ROWS, FEATURES], tl.float32)
        for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            there = column < WIDTH
            part = tl.load(
                x + row[:, None] * WIDTH + column[None, :],
                present[:, None] & there[None, :],
                0.0,
                cache_modifier=".cg",
            )
            w = tl.load(weight + feature[:, None] * WIDTH + column[None, :], inside[:, None] & there[None, :], 0.0)
            y = tl.dot(part, tl.trans(w), y, input_precision=PRECISION)
        y += tl.load(bias + feature, inside, 0.0).to(tl.float32)[None, :]
        if GELU:
            y = gelu_by_tanh(y)
        place = row[:, None] * NUM_FEATURES + feature[None, :]
        tl.store(out + place, y.to(out.dtype.element_ty), present[:, None] & inside[None, :])


@triton.jit
def _attend(
    kind, qkv, attended, angles, previous, following, length, store, point, num_blocks, store_point_stride, scale,
    SIZE: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """All heads of all blocks, by turns."""
    for task in range(tl.program_id(0), 2 * num_blocks * HEADS, PROGRAMS):
        place, head = task // HEADS, task % HEADS
        if kind == 0:
            attend_block(
                place, head, qkv, attended, angles, previous, following, length, store, point, num_blocks,
                store_point_stride, scale, SIZE, PAD, HALF, HEADS, False, False, PRECISION,
            )  # fmt: skip
        elif kind == 1:
            attend_block(
                place, head, qkv, attended, angles, previous, following, length, store, point, num_blocks,
                store_point_stride, scale, SIZE, PAD, HALF, HEADS, True, False, PRECISION,
            )  # fmt: skip
        elif kind == 2:
            attend_block(
                place, head, qkv, attended, angles, previous, following, length, store, point, num_blocks,
                store_point_stride, scale, SIZE, PAD, HALF, HEADS, False, True, PRECISION,
            )  # fmt: skip
        else:
            attend_block(
                place, head, qkv, attended, angles, previous, following, length, store, point, num_blocks,
                store_point_stride, scale, SIZE, PAD, HALF, HEADS, True, True, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_layers"])
def _all_layers(
    hidden, normed, qkv, attended, up, out, weights, modulation, kinds, angles, previous, following, length, keep,
    store, point, arrived, num_blocks, num_layers, layer_stride, modulation_stride, store_point_stride,
    store_layer_stride, scale, eps,
    SIZE: tl.constexpr, PAD: tl.constexpr, HIDDEN: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    INNER: tl.constexpr, BETWEEN: tl.constexpr, NORM_BLOCK: tl.constexpr, KEEP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, NARROW: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_rows = 2 * num_blocks * SIZE
    looking_back = 0  # layers before this one that look back
    # A multiple of PROGRAMS between two launches; others of this launch may have counted already.
    wanted = (tl.load(arrived, volatile=True) // PROGRAMS + 1) * PROGRAMS
    for layer in range(num_layers):
        qkv_weight = weights + layer * layer_stride
        qkv_bias = qkv_weight + 3 * INNER * HIDDEN
        out_weight = qkv_bias + 3 * INNER
        out_bias = out_weight + HIDDEN * INNER
        up_weight = out_bias + HIDDEN
        up_bias = up_weight + BETWEEN * HIDDEN
        down_weight = up_bias + BETWEEN
        down_bias = down_weight + HIDDEN * BETWEEN
        shift = modulation + layer * modulation_stride
        kind = tl.load(kinds + layer)
        layer_store = store + looking_back * store_layer_stride

        for row in range(program, num_rows, PROGRAMS):
            add_and_norm_row(
                row, hidden, out, layer > 0, shift - modulation_stride + 5 * HIDDEN, shift + HIDDEN, shift, point,
                normed, normed, num_blocks, 6 * HIDDEN, 6 * HIDDEN, HIDDEN, eps, SIZE, False, NORM_BLOCK,
            )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        _product(
            normed, qkv_weight, qkv_bias, qkv, num_rows, HIDDEN, 3 * INNER, False, ROWS, FEATURES, COLUMNS,
            STAGES, PRECISION, PROGRAMS,
        )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        _attend(
            kind, qkv, attended, angles, previous, following, length, layer_store, point, num_blocks,
            store_point_stride, scale, SIZE, PAD, HALF, HEADS, PRECISION, PROGRAMS,
        )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        if kind % 2 == 1:  # not before all have read what is kept
            for row in range(program, num_rows, PROGRAMS):
                keep_row(row, qkv, keep, layer_store, point, num_blocks, store_point_stride, SIZE, KEEP_BLOCK, INNER)
        _product(
            attended, out_weight, out_bias, out, num_rows, INNER, HIDDEN, False, ROWS, NARROW, COLUMNS,
            STAGES, PRECISION, PROGRAMS,
        )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        for row in range(program, num_rows, PROGRAMS):
            add_and_norm_row(
                row, hidden, out, True, shift + 2 * HIDDEN, shift + 4 * HIDDEN, shift + 3 * HIDDEN, point, normed,
                normed, num_blocks, 6 * HIDDEN, 6 * HIDDEN, HIDDEN, eps, SIZE, False, NORM_BLOCK,
            )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        _product(
            normed, up_weight, up_bias, up, num_rows, HIDDEN, BETWEEN, True, ROWS, FEATURES, COLUMNS, STAGES,
            PRECISION, PROGRAMS,
        )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        _product(
            up, down_weight, down_bias, out, num_rows, BETWEEN, HIDDEN, False, ROWS, NARROW, COLUMNS, STAGES,
            PRECISION, PROGRAMS,
        )  # fmt: skip
        wanted = _wait_for_all(arrived, wanted, PROGRAMS)
        looking_back += kind % 2


class ResidentLayers:
    """The layers' weights in one piece of memory, and the kernel that runs them all.

    `layers`: their tensors are moved, so that they exist once; `modulation`: float32 `[layers, times, 6 * hidden]`.
    """

    def __init__(self, layers: Sequence[DiTLayer], modulation: torch.Tensor, heads: int, block_size: int) -> None:
        self.layers, self._weights = _in_one_piece(layers)
        self._modulation = modulation
        self._heads, self._size = heads, block_size
        first, device = layers[0], modulation.device
        self._inner, self._hidden = len(first.qkv_bias) // 3, len(first.out_bias)
        self._between = len(first.up_bias)
        kinds = [LOOKS_BACK * layer.looks_back + LOOKS_AHEAD * layer.looks_ahead for layer in layers]
        self._kinds = torch.tensor(kinds, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int64, device=device)
        self._programs = _programs(device)

    def __call__(
        self,
        hidden: torch.Tensor,
        point: torch.Tensor,
        blocks: PackedBlocks,
        rotary: torch.Tensor,
        store: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """The last layer's output, not yet added: `[2 * N * size, hidden]` in the products' dtype.

        `hidden` float32 of that shape: the residual stream, changed in place. `point` int64 `[N]`. `store`: that of
        the DiT, all layers that look back.
        """
        rows, dtype, device, programs = hidden.shape[0], self._weights.dtype, hidden.device, self._programs
        half = dtype.itemsize == 2

        def empty(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        normed, qkv, attended = empty(self._hidden), empty(3 * self._inner), empty(self._inner)
        up, out = empty(self._between), empty(self._hidden)
        _all_layers[(programs,)](
            hidden,
            normed,
            qkv,
            attended,
            up,
            out,
            self._weights,
            self._modulation,
            self._kinds,
            rotary,
            blocks.previous,
            blocks.following,
            blocks.length,
            blocks.keep,
            store,
            point,
            self._arrived,
            point.shape[0],
            len(self.layers),
            self._weights.stride(0),
            self._modulation.stride(0),
            store.stride(0),
            store.stride(1),
            (self._inner // self._heads) ** -0.5,
            eps,
            SIZE=self._size,
            PAD=triton.next_power_of_2(self._size),
            HIDDEN=self._hidden,
            HALF=self._inner // self._heads // 2,
            HEADS=self._heads,
            INNER=self._inner,
            BETWEEN=self._between,
            NORM_BLOCK=triton.next_power_of_2(self._hidden),
            KEEP_BLOCK=triton.next_power_of_2(2 * self._inner),
            ROWS=ROWS,
            FEATURES=FEATURES,
            NARROW=NARROW,
            COLUMNS=COLUMNS if half else COLUMNS // 4,  # a tile of float32 has to fit too
            STAGES=STAGES,
            PRECISION="tf32" if half else "ieee",
            PROGRAMS=programs,
            num_warps=WARPS,
            launch_cooperative_grid=programs > 1,  # all programs run at once, or the launch fails
        )
        return out


def _programs(device: torch.device) -> int:
    """One alone where Triton interprets, as it runs them one after another."""
    if device.type != "cuda":
        return 1
    return min(PROGRAMS, torch.cuda.get_device_properties(device).multi_processor_count)


def _in_one_piece(layers: Sequence[DiTLayer]) -> tuple[list[DiTLayer], torch.Tensor]:
    """The layers with their tensors as views of one tensor `[layers, elements of a layer]`, and that tensor."""
    names = ("qkv", "qkv_bias", "out", "out_bias", "up", "up_bias", "down", "down_bias")
    weights = torch.stack([torch.cat([getattr(layer, name).flatten() for name in names]) for layer in layers])
    moved = []
    for layer, row in zip(layers, weights, strict=True):
        shapes = {name: getattr(layer, name).shape for name in names}
        parts = row.split([shape.numel() for shape in shapes.values()])
        views = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        moved.append(type(layer)(**views, looks_back=layer.looks_back, looks_ahead=layer.looks_ahead))
    return moved, weights
