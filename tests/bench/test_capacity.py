"""The search for the highest rate, on servers that are functions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from omni_cluster.bench.capacity import MAX_CELLS, Capacity, Search, Tried


def searched(search: Search, share_at: Callable[[float], float]) -> tuple[Capacity, list[float]]:
    tried: list[Tried] = []
    while (rate := search.next_rate_per_s(tried)) is not None:
        tried.append(Tried(rate, share_at(rate)))
    return search.found(tried), [cell.rate_per_s for cell in tried]


@pytest.mark.parametrize("precision", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("limit", [0.25, 0.3, 1.0, 4.99, 7.3, 31.0, 63.9])
def test_the_limit_is_found_to_the_precision(limit: float, precision: float) -> None:
    found, rates = searched(Search(precision=precision), lambda rate: 1.0 if rate <= limit else 0.98)
    assert found.passed_per_s is not None and found.failed_per_s is not None
    assert found.passed_per_s <= limit < found.failed_per_s <= found.passed_per_s * (1 + precision)
    assert len(rates) == len(set(rates)) == found.cells <= MAX_CELLS
    assert str(found) == (
        f"capacity: {found.passed_per_s:g}/s with 99 % of the streams without a gap; {found.failed_per_s:g}/s failed"
    )


def test_rates_are_doubled_until_one_fails_then_halved_between() -> None:
    _, rates = searched(Search(between_per_s=(1.0, 64.0)), lambda rate: float(rate <= 7.0))
    assert rates == [1, 2, 4, 8, 5.657, 6.727, 7.336]


@pytest.mark.parametrize("seed", range(50))
def test_a_server_that_is_not_sure_is_searched_to_an_end_where_it_is_not(seed: int) -> None:
    draw = random.Random(seed)

    def share_at(rate: float) -> float:
        return 1.0 if rate < 6 else 0.9 if rate > 9 else draw.choice((0.95, 0.99, 1.0))

    found, rates = searched(Search(), share_at)
    assert len(rates) == len(set(rates)) <= MAX_CELLS and found.is_exact
    assert found.passed_per_s is not None and 6 / 1.1 <= found.passed_per_s <= 9
    assert found.failed_per_s is not None and 6 <= found.failed_per_s <= 9 * 1.1


def test_a_lowest_rate_that_fails_is_told() -> None:
    found, rates = searched(Search(between_per_s=(0.5, 8.0)), lambda rate: 0.98)
    assert rates == [0.5] and found.passed_per_s is None
    assert str(found) == (
        "capacity: below 0.5/s, the lowest rate tried, which had not 99 % of the streams without a gap"
    )


def test_a_highest_rate_that_passes_is_told() -> None:
    found, rates = searched(Search(between_per_s=(1.0, 6.0)), lambda rate: 0.99)
    assert rates == [1, 2, 4, 6] and found.failed_per_s is None
    assert "6/s or more: the highest rate tried still had 99 %" in str(found)


def test_one_rate_may_be_all() -> None:
    assert searched(Search(between_per_s=(3.0, 3.0)), lambda rate: 1.0)[1] == [3.0]


def test_cells_that_are_too_few_are_told() -> None:
    found, rates = searched(Search(between_per_s=(1.0, 64.0), max_cells=4), lambda rate: float(rate <= 3))
    assert rates == [1, 2, 4, 2.828]
    assert str(found).endswith("4/s failed; 4 cells were too few for a precision of 10 %")


def test_the_share_says_what_passes() -> None:
    assert searched(Search(share=0.5), lambda rate: 1 / rate)[0].passed_per_s == pytest.approx(2.0, rel=0.1)
