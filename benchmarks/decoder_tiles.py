"""Microseconds of the decoder's products by how they are cut, alone on a card: what `decoder_tiles.py` is made of.

    python -m benchmarks.decoder_tiles OUT.json [--of thinker] [--dtype float8] [--rows 1 16 32 64] [--processes 12]

Of the Omni 7B's decoders. A launch is one among those of all layers or more, whose weights no cache holds.
A cut whose result is not that of the one in use, or another each time, is left out.
OUT.json gets all cuts that were tried, the fastest first; a table says the fastest, and what the one in use takes.
Triton compiles in so many processes beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from omni_cluster.kernels import float8
from omni_cluster.kernels.decoder_kernels import (
    NUM_COUNTERS,
    Weight,
    can_overlap,
    linear_add,
    norm_gate_up,
    norm_linear,
    padded_rows,
)
from omni_cluster.kernels.decoder_tiles import (
    GATE_UP_TILES,
    LINEAR_ADD_TILES,
    QKV_TILES,
    Tiles,
    TilesByDtype,
    tiles_of_nearest,
)

EPS = 1e-6
LAYERS = 28
LEAST_BYTES = 200_000_000
"""Of all weights together: several times the card's caches."""
REPLAYS = 7
CLOSE = 5e-3
"""Relative error between two ways of summing a product."""
DTYPES: Mapping[str, torch.dtype] = {"float8": float8.VALUES, "bfloat16": torch.bfloat16}
TABLES = {"qkv": QKV_TILES, "gate_up": GATE_UP_TILES, "o": LINEAR_ADD_TILES, "down": LINEAR_ADD_TILES}


@dataclass(frozen=True, slots=True)
class Product:
    """A weight `[features, width]` of each layer, and what is tried for one row and for several."""

    name: str
    features: int
    width: int

    @property
    def in_use(self) -> TilesByDtype:
        return TABLES[self.name]

    @property
    def is_added(self) -> bool:
        """To the residual stream; else its input is normed."""
        return self.in_use is LINEAR_ADD_TILES

    def candidates(self, rows: int, dtype: torch.dtype) -> Iterator[Tiles]:
        one, is_norm = rows == 1, not self.is_added
        if one and is_norm:  # a program has whole rows
            columns = triton.next_power_of_2(self.width)
            yield from (Tiles(f, columns, 1, w, 1) for f, w in itertools.product((1, 2, 4, 8, 16), (2, 4, 8)))
        elif one:
            sizes = itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4), (2, 4, 8))
            yield from (Tiles(f, c, s, w, 1) for f, c, s, w in sizes)
        else:
            splits = (1,) if is_norm else (2, 4, 8)
            features = (16, 32) if dtype == float8.VALUES else (16, 32, 64, 128)  # see `decoder_tiles`
            sizes = itertools.product(features, (64, 128, 256), splits, (3, 4, 5))
            yield from (Tiles(f, c, s, 4, stages) for f, c, s, stages in sizes)


PRODUCTS: Mapping[str, Sequence[Product]] = {
    "thinker": (
        Product("qkv", 4608, 3584),
        Product("gate_up", 37888, 3584),
        Product("o", 3584, 3584),
        Product("down", 3584, 18944),
    ),
    "talker": (
        Product("qkv", 2560, 896),
        Product("gate_up", 37888, 896),
        Product("o", 896, 1536),
        Product("down", 896, 18944),
    ),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """`us`: of one launch; None if the card has not the memory for such tiles, or they make something else."""

    tiles: Tiles
    us: float | None


class Launches:
    """Of one product, for so many rows, with a weight of the same values for each of `layers` layers."""

    def __init__(self, product: Product, rows: int, dtype: torch.dtype, layers: int) -> None:
        self._product = product
        width, features = product.width, product.features
        self._x, self._gain = torch.randn(rows, width, device="cuda").bfloat16(), self._ones(width)
        self._bias, self._residual = self._ones(features), self._ones(rows, features)
        self._weights = [_drawn(features, width, dtype)]
        self._weights += [Weight(self._weights[0].values.clone(), self._weights[0].scales) for _ in range(1, layers)]
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
        # By the residual stream, as the decoder has it.
        self._overlap = can_overlap(self._residual if product.is_added else self._x)
        self.tiles_in_use = tiles_of_nearest(product.in_use, self._weights[0].values)[padded_rows(rows)]
        self._wanted = self._launch(self._weights[0], self.tiles_in_use).float()

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, device="cuda", dtype=torch.bfloat16)

    def __call__(self, tiles: Tiles) -> None:
        for weight in self._weights:
            self._launch(weight, tiles)

    def _launch(self, weight: Weight, tiles: Tiles) -> torch.Tensor:
        x, overlap = self._x, self._overlap
        if self._product.is_added:
            return linear_add(x, weight, self._residual, self._counters, overlap=overlap, tiles=tiles)
        if self._product.name == "qkv":
            return norm_linear(x, self._gain, EPS, weight, self._bias, overlap=overlap, tiles=tiles)
        return norm_gate_up(x, self._gain, EPS, weight, overlap=overlap, tiles=tiles)

    def _is_right(self, tiles: Tiles) -> bool:
        made, *again = (self._launch(self._weights[0], tiles) for _ in range(REPLAYS))
        error = (made.float() - self._wanted).norm() / self._wanted.norm()
        return bool(error < CLOSE) and all(torch.equal(made, other) for other in again)

    def timed(self, tiles: Tiles) -> Timed:
        try:
            if not self._is_right(tiles):
                return Timed(tiles, None)
            self(tiles)
        except triton.OutOfResources:
            return Timed(tiles, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self(tiles)
        graph.replay()
        return Timed(tiles, 1000 * statistics.median(_replay_ms(graph) for _ in range(REPLAYS)) / len(self._weights))


def _drawn(features: int, width: int, dtype: torch.dtype) -> Weight:
    values = (torch.randn(features, width, device="cuda") * width**-0.5).bfloat16()
    if dtype == values.dtype:
        return Weight(values)
    return Weight((values * 64).to(dtype), torch.full((1,), 1 / 64, device="cuda"))


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@dataclass(frozen=True, slots=True)
class Cell:
    product: Product
    rows: int

    def candidates(self, dtype: torch.dtype) -> Iterator[Tiles]:
        return self.product.candidates(self.rows, dtype)

    def timed(self, dtype: torch.dtype) -> tuple[Timed, list[Timed]]:
        """Of the tiles in use, and of all that are tried, the fastest first."""
        weight_bytes = self.product.features * self.product.width * dtype.itemsize
        launches = Launches(self.product, self.rows, dtype, max(LAYERS, -(-LEAST_BYTES // weight_bytes)))
        in_use, *others = map(launches.timed, (launches.tiles_in_use, *self.candidates(dtype)))
        timed = (each for each in (in_use, *others) if each.us is not None)
        return in_use, sorted(timed, key=lambda each: each.us or 0.0)


@functools.lru_cache(maxsize=1)
def _launches_of_one_layer(cell: Cell, dtype: torch.dtype) -> Launches:
    return Launches(cell.product, cell.rows, dtype, layers=1)


def _compile(cell: Cell, dtype: torch.dtype, tiles: Tiles) -> None:
    with contextlib.suppress(triton.OutOfResources):
        _launches_of_one_layer(cell, dtype)(tiles)


def compile_beforehand(cells: Sequence[Cell], dtype: torch.dtype, processes: int) -> None:
    """Into Triton's cache. A process takes a few tiles at a time, since some cells have four times as many."""
    work = [(cell, dtype, tiles) for cell in cells for tiles in cell.candidates(dtype)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(_compile, work, chunksize=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--of", choices=PRODUCTS, nargs="+", default=list(PRODUCTS))
    parser.add_argument("--dtype", choices=DTYPES, default="float8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    cells = [Cell(product, rows) for model in options.of for product in PRODUCTS[model] for rows in options.rows]
    compile_beforehand(cells, dtype, options.processes)
    all_tried = []
    print("| weight | rows | in use | us | fastest | us |\n|---|---|---|---|---|---|")
    for cell in cells:
        in_use, tried = cell.timed(dtype)
        fastest = tried[0]
        name = f"{cell.product.name} {cell.product.features} x {cell.product.width}"
        used = "-" if in_use.us is None else f"{in_use.us:.1f}"
        columns = f"{tuple(in_use.tiles)} | {used} | {tuple(fastest.tiles)} | {fastest.us:.1f}"
        print(f"| {name} | {cell.rows} | {columns} |", flush=True)
        size = [cell.product.features, cell.product.width]
        tried_here = [asdict(each) for each in tried]
        all_tried.append({"weight": cell.product.name, "size": size, "rows": cell.rows, "tried": tried_here})
    options.out.write_text(json.dumps({"dtype": options.dtype, "cells": all_tried}, indent=1))


if __name__ == "__main__":
    main()
