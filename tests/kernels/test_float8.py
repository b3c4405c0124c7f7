"""Rows of float8: what rounding does to them, and that a row is rounded the same beside any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from omni_cluster.kernels import float8
from omni_cluster.kernels.float8 import Float8Rows
from omni_cluster.types.errors import ConfigError

ROOT = Path(__file__).parents[2]
WIDTHS = [16, 48, 1024]


def rows(count: int, width: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Of sizes far from each other, the last of zeros."""
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    drawn *= 10.0 ** torch.arange(-(count // 2), count - count // 2)[:, None]
    drawn[-1] = 0.0
    return drawn.to(device)


def plain(rows: Float8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales


def snr_db(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (made - wanted).square().sum()))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gelu", [False, True])
def test_each_value_is_rounded_by_a_sixteenth_of_itself_or_by_its_rows_smallest_step(width: int, gelu: bool) -> None:
    given = rows(8, width)
    wanted = F.gelu(given, approximate="tanh") if gelu else given
    made = plain(float8.quantized(given, gelu=gelu))
    smallest = wanted.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert ((made - wanted).abs() <= wanted.abs() / 16 * 1.001 + smallest).all()
    assert (made[-1] == 0).all()


def test_a_row_is_the_same_beside_any_other() -> None:
    given, weight, bias = rows(8, 48), float8.quantized(rows(32, 48, 1)), torch.zeros(32, dtype=torch.bfloat16)
    together = float8.product(float8.quantized(given), weight, bias)
    for i in range(8):
        alone = float8.product(float8.quantized(given[i : i + 1]), weight, bias)
        torch.testing.assert_close(together[i : i + 1], alone, atol=0, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_product_is_the_one_of_its_rounded_rows(width: int) -> None:
    x, w, bias = torch.randn(5, width), torch.randn(32, width), torch.randn(32).to(torch.bfloat16)
    x8, w8 = float8.quantized(x), float8.quantized(w)
    made = float8.product(x8, w8, bias)
    assert made.dtype == torch.bfloat16
    exact = plain(x8) @ plain(w8).T + bias.float()
    torch.testing.assert_close(made.float(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))
    assert snr_db(made.float(), x @ w.T + bias.float()) > 25


def test_a_card_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"^dtype is float8 and the card has compute capability 8\.0: use bfloat16"):
        float8.check_device(torch.device("cuda"))
    float8.check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    float8.check_device(torch.device("cuda"))


def test_kernels_as_triton_interprets_them() -> None:
    """Of rows that float8 holds exactly: Triton's interpreter loses a carry where one is rounded up."""
    command = [sys.executable, "-m", "tests.kernels.interpreted_float8"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    assert len(made) == 3 and all(float(difference) < 1e-6 for difference in made)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gelu", [False, True])
def test_kernel_rounds_as_plain_pytorch_does(width: int, gelu: bool) -> None:
    given = rows(8, width).to(torch.bfloat16)
    wanted, made = float8.quantized(given, gelu=gelu), float8.quantized(given.cuda(), gelu=gelu)
    torch.testing.assert_close(made.scales.cpu(), wanted.scales, rtol=1e-5, atol=0)
    differs = made.values.cpu().float() != wanted.values.float()
    # Two that compute GELU, or divide, in another order may round a value between two of float8 to either.
    assert differs.float().mean() < 0.02
    torch.testing.assert_close(plain(made).cpu(), plain(wanted), rtol=0.13, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_product_on_cuda_is_that_of_its_values(width: int) -> None:
    x, w, bias = torch.randn(50, width), torch.randn(32, width), torch.randn(32).to(torch.bfloat16)
    x8, w8 = float8.quantized(x), float8.quantized(w)
    on_cuda = [Float8Rows(each.values.cuda(), each.scales.cuda()) for each in (x8, w8)]
    made = float8.product(*on_cuda, bias.cuda()).cpu().float()
    # PyTorch 2.11 has no product of scaled rows on a CPU.
    assert snr_db(made, plain(x8) @ plain(w8).T + bias.float()) > 45
