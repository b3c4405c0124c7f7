"""How the decoder's kernels cut their work, as it was measured: products of weights, and keys of requests.

`python -m benchmarks.decoder_tiles` measures products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from omni_cluster.kernels.float8 import VALUES


class Tiles(NamedTuple):
    """How a product is cut: features (rows of the weight) and columns a tile, programs that share a row, and Triton's
    warps and stages; `ahead`: columns of each row that are asked for before the input is there."""

    features: int
    columns: int
    splits: int
    warps: int
    stages: int
    ahead: int = 0


TilesByShape = Mapping[tuple[int, int], Mapping[int, Tiles]]
"""Of the weights that were measured, `(features, width)`, by padded rows."""
TilesByDtype = Mapping[torch.dtype, TilesByShape]
"""By what the weights are stored in."""


class KeySplits(NamedTuple):
    """How the keys of a request are cut: programs that share them, keys a tile, and Triton's warps."""

    splits: int
    keys: int
    warps: int


def tiles_of_nearest(measured: TilesByDtype, weight: torch.Tensor) -> Mapping[int, Tiles]:
    """Those of the measured weight of its dtype whose size is nearest to `weight` `[features, width]`."""
    by_shape = measured[weight.dtype]
    return by_shape[min(by_shape, key=lambda shape: abs(math.log(math.prod(shape) / weight.numel())))]


# Measured on one H200 at the sizes of the Omni 7B's talker and thinker, by padded rows; after each the microseconds of
# one launch among all layers' weights (the norm's included).
_QKV_BFLOAT16: TilesByShape = {
    (2560, 896): {
        1: Tiles(8, 1024, 1, 4, 1),  # 2.2
        16: Tiles(32, 128, 1, 4, 4, 896),  # 5.0
        32: Tiles(16, 128, 1, 4, 4),  # 5.5
        64: Tiles(16, 128, 1, 2, 4),  # 7.6
    },
    (4608, 3584): {
        1: Tiles(4, 4096, 1, 4, 1),  # 9.7
        16: Tiles(16, 256, 1, 2, 5),  # 13.1
        32: Tiles(64, 128, 1, 4, 4),  # 15.4
        64: Tiles(64, 128, 1, 4, 4),  # 16.5
    },
}
_GATE_UP_BFLOAT16: TilesByShape = {
    (37888, 896): {
        1: Tiles(4, 1024, 1, 2, 1),  # 17.0
        16: Tiles(64, 128, 1, 4, 2),  # 20.3
        32: Tiles(128, 64, 1, 4, 3),  # 21.3
        64: Tiles(64, 64, 1, 4, 5),  # 25.9
    },
    (37888, 3584): {
        1: Tiles(2, 4096, 1, 4, 1),  # 61.6
        16: Tiles(64, 128, 1, 4, 4),  # 69.2
        32: Tiles(64, 128, 1, 4, 4, 1792),  # 72.9
        64: Tiles(64, 128, 1, 4, 4),  # 78.2
    },
}
_LINEAR_ADD_BFLOAT16: TilesByShape = {
    (896, 1536): {
        1: Tiles(4, 2048, 1, 8, 1),  # 1.9
        16: Tiles(32, 128, 4, 4, 3, 384),  # 3.3
        32: Tiles(32, 128, 4, 4, 3),  # 3.8
        64: Tiles(32, 128, 4, 4, 3),  # 4.7
    },
    (896, 18944): {
        1: Tiles(8, 1024, 4, 4, 1),  # 10.9
        16: Tiles(32, 128, 9, 4, 5),  # 11.9
        32: Tiles(32, 128, 9, 4, 4),  # 13.4
        64: Tiles(32, 128, 9, 4, 5),  # 19.6
    },
    (3584, 3584): {
        1: Tiles(4, 2048, 1, 8, 1),  # 7.4
        16: Tiles(32, 128, 2, 4, 5),  # 9.7
        32: Tiles(32, 128, 2, 4, 5, 1792),  # 11.1
        64: Tiles(32, 256, 2, 4, 3, 1792),  # 14.4
    },
    (3584, 18944): {
        1: Tiles(4, 2048, 1, 8, 1),  # 33.7
        16: Tiles(32, 256, 2, 4, 3),  # 37.9
        32: Tiles(64, 128, 4, 4, 4),  # 38.8
        64: Tiles(64, 64, 4, 4, 7),  # 43.9
    },
}


def _for_float8(measured: TilesByShape) -> dict[tuple[int, int], dict[int, Tiles]]:
    """Those of bfloat16, cut to 32 features, for what is not measured in e4m3.

    A product of several rows with more features becomes one of Hopper's warp groups. It would take the converted
    weight from registers, which Triton 3.7 writes again while the group may be reading them.
    """
    return {
        shape: {
            rows: tiles if rows == 1 else tiles._replace(features=min(tiles.features, 32), ahead=0)
            for rows, tiles in by_rows.items()
        }
        for shape, by_rows in measured.items()
    }


# Measured on one H200 for the thinker: 1, 16 and 32 rows; 64 rows have the tiles of 32.
_QKV_FLOAT8 = _for_float8(_QKV_BFLOAT16) | {
    (4608, 3584): {
        1: Tiles(4, 4096, 1, 4, 1),  # 6.7
        16: Tiles(32, 256, 1, 4, 3),  # 13.5
        32: Tiles(16, 128, 1, 4, 5),  # 17.8
        64: Tiles(16, 128, 1, 4, 5),
    },
}
_GATE_UP_FLOAT8 = _for_float8(_GATE_UP_BFLOAT16) | {
    (37888, 3584): {
        1: Tiles(4, 4096, 1, 4, 1),  # 34.3
        16: Tiles(32, 256, 1, 4, 3),  # 53.4
        32: Tiles(16, 128, 1, 4, 4),  # 72.4
        64: Tiles(16, 128, 1, 4, 4),
    },
}
_LINEAR_ADD_FLOAT8 = _for_float8(_LINEAR_ADD_BFLOAT16) | {
    (3584, 3584): {
        1: Tiles(4, 4096, 1, 4, 1),  # 5.5
        16: Tiles(32, 256, 8, 4, 3),  # 8.6
        32: Tiles(32, 128, 2, 4, 5),  # 11.3
        64: Tiles(32, 128, 2, 4, 5),
    },
    (3584, 18944): {
        1: Tiles(2, 2048, 1, 4, 1),  # 28.3
        16: Tiles(32, 128, 8, 4, 4),  # 25.8
        32: Tiles(32, 128, 8, 4, 3),  # 40.2
        64: Tiles(32, 128, 8, 4, 3),
    },
}

QKV_TILES: TilesByDtype = {torch.bfloat16: _QKV_BFLOAT16, VALUES: _QKV_FLOAT8}
GATE_UP_TILES: TilesByDtype = {torch.bfloat16: _GATE_UP_BFLOAT16, VALUES: _GATE_UP_FLOAT8}
LINEAR_ADD_TILES: TilesByDtype = {torch.bfloat16: _LINEAR_ADD_BFLOAT16, VALUES: _LINEAR_ADD_FLOAT8}

# By requests, as a power of two; the microseconds are of 700 keys a request, in the talker and in the thinker. One
# request has more programs than 700 keys need, for the sake of long prompts.
KEY_SPLITS = {
    1: KeySplits(32, 64, 4),  # 7.5 (thinker)
    2: KeySplits(32, 32, 4),
    4: KeySplits(8, 32, 2),  # 8.5 (thinker)
    8: KeySplits(8, 32, 2),
    16: KeySplits(8, 32, 2),  # 11.4, 13.3
    32: KeySplits(2, 64, 4),  # 17.1, 20.5
    64: KeySplits(2, 64, 4),  # 33.0, 37.5
}
