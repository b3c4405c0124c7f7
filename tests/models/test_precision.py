from __future__ import annotations

import pytest
import torch

from omni_cluster.config.precision import Precision
from omni_cluster.models.precision import products_in, tensor_dtype


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("float32", torch.float32),
        ("tfloat32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_tensors_of_each_precision(precision: Precision, dtype: torch.dtype) -> None:
    assert tensor_dtype(precision) is dtype


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "rounds"), [("float32", False), ("tfloat32", True)])
def test_only_tfloat32_rounds_and_the_switches_are_as_before_after(precision: Precision, rounds: bool) -> None:
    before = switches()
    with pytest.raises(KeyError), products_in(precision):
        assert switches() == (rounds, rounds)
        raise KeyError
    assert switches() == before


@pytest.mark.gpu
def test_tfloat32_loses_digits_of_a_product_and_float32_does_not() -> None:
    a, b = torch.randn(2, 256, 256, device="cuda", dtype=torch.float64)
    wanted, errors = a @ b, {}
    for precision in ("float32", "tfloat32"):
        with products_in(precision):
            errors[precision] = ((a.float() @ b.float()).double() - wanted).abs().max().item()
    assert errors["float32"] < 1e-4 < 1e-3 < errors["tfloat32"]
