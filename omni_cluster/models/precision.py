"""What a model computes in, as the configuration names it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from omni_cluster.config.precision import LayerPrecision

_TENSORS = {"tfloat32": "float32", "float8": "bfloat16"}


def tensor_dtype(precision: LayerPrecision) -> torch.dtype:
    """The dtype of weights and activations; in float8 that of all but what a product takes."""
    dtype: torch.dtype = getattr(torch, _TENSORS.get(precision, precision))
    return dtype


@contextlib.contextmanager
def products_in(precision: LayerPrecision) -> Iterator[None]:
    """Float32 products and convolutions on CUDA round to TF32 inside, or do not; PyTorch's switch for it is global."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tfloat32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
