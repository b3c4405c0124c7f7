from __future__ import annotations

import pytest
import torch

from omni_cluster.types.errors import PayloadError
from omni_cluster.types.inputs import StageExtra
from omni_cluster.types.rows import NO_ID, Rows
from omni_cluster.vllm_engine.worker.step_rows import NOWHERE, OmniModelInputBuilder, TokenSpan
from tests.rows import rows_of

WIDTH = 4
PAD_ROW = torch.full((WIDTH,), -1.0)


def rows(first: int, count: int) -> torch.Tensor:
    """Rows whose every element is the row's number, so that a row out of place shows."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, WIDTH)


def extra(*parts: torch.Tensor, positions: torch.Tensor | None = None) -> StageExtra:
    """Of rows that follow each other; the positions with the first."""
    packed, start = [], 0
    for part in parts:
        packed.append(rows_of(start, part, None if start else positions).to_bytes())
        start += len(part)
    return StageExtra("key", rows=tuple(packed), pad_row=rows_of(0, PAD_ROW[None]).to_bytes())


@pytest.fixture
def builder() -> OmniModelInputBuilder:
    # Rows of an earlier step must not show through, so the staging starts dirty.
    return OmniModelInputBuilder(torch.full((16, WIDTH), 99.0), max_elements=1000)


def numbers(builder: OmniModelInputBuilder, *spans: tuple[str, int, int]) -> list[float]:
    step = builder.build([TokenSpan(*span) for span in spans])
    assert step is not None
    assert torch.equal(step, step[:, :1].expand(-1, WIDTH))
    return step[:, 0].tolist()


def test_step_holds_the_rows_of_each_request_in_the_batchs_order(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 5)))
    builder.admit("b", extra(rows(20, 5)))
    assert numbers(builder, ("b", 0, 2), ("a", 3, 2), ("b", 4, 1)) == [20, 21, 13, 14, 24]


def test_positions_after_the_last_row_take_the_pad_row(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 3)))
    assert numbers(builder, ("a", 2, 3)) == [12, -1, -1]
    assert numbers(builder, ("a", 3, 1)) == [-1]
    assert numbers(builder, ("a", 100, 2)) == [-1, -1]


def test_pad_row_of_one_request_does_not_reach_into_the_next(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 1)))
    builder.admit("b", extra(rows(20, 2)))
    assert numbers(builder, ("a", 0, 3), ("b", 0, 2)) == [10, -1, -1, 20, 21]


def test_requests_that_brought_no_rows_get_zeros(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 1)))
    builder.admit("plain", StageExtra("plain"))
    assert numbers(builder, ("foreign", 0, 2), ("a", 0, 1), ("plain", 0, 1)) == [0, 0, 10, 0]


def test_without_a_pad_row_the_positions_after_the_last_are_zero(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", StageExtra("key", rows=(rows_of(0, rows(10, 1)).to_bytes(),)))
    assert numbers(builder, ("a", 0, 2)) == [10, 0]


def test_rows_pushed_one_at_a_time_keep_their_places(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(0, 2)))
    for number in range(2, 12):
        builder.push("a", rows_of(number, rows(number, 1)))
        assert numbers(builder, ("a", number, 2)) == [number, -1]
    assert numbers(builder, ("a", 0, 12)) == list(range(12))


def test_a_push_of_more_rows_than_twice_those_that_are_there_fits(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(0, 1)))
    builder.push("a", rows_of(1, rows(1, 12)))
    assert numbers(builder, ("a", 0, 14)) == [*range(13), -1]


def test_growth_leaves_other_requests_alone(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(0, 2)))
    builder.admit("b", extra(rows(50, 2)))
    builder.push("a", rows_of(2, rows(2, 5)))
    assert numbers(builder, ("b", 0, 3), ("a", 5, 3)) == [50, 51, -1, 5, 6, -1]


def test_admission_after_a_preemption_keeps_the_rows_that_came_meanwhile(builder: OmniModelInputBuilder) -> None:
    first = extra(rows(0, 2))
    builder.admit("a", first)
    builder.push("a", rows_of(2, rows(2, 2)))
    builder.admit("a", first)
    assert numbers(builder, ("a", 0, 5)) == [0, 1, 2, 3, -1]


def test_removed_request_gets_zeros_and_its_late_rows_are_dropped(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 2), positions=torch.zeros(3, 2, dtype=torch.int64)))
    assert len(builder) == 1
    builder.remove("a")
    builder.push("a", rows_of(2, rows(12, 1)))
    assert len(builder) == 0
    assert numbers(builder, ("a", 0, 2)) == [0, 0]
    assert builder.positions("a") is None


def test_removal_of_a_request_that_is_not_there_is_no_error(builder: OmniModelInputBuilder) -> None:
    builder.remove("never came")
    assert len(builder) == 0


def test_same_id_after_removal_starts_afresh(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 3)))
    builder.remove("a")
    builder.admit("a", extra(rows(20, 1)))
    assert numbers(builder, ("a", 0, 2)) == [20, -1]


def test_positions_are_those_that_came_with_the_request(builder: OmniModelInputBuilder) -> None:
    positions = torch.arange(6).view(3, 2)
    builder.admit("a", extra(rows(0, 2), positions=positions))
    builder.admit("b", extra(rows(0, 2)))
    given = builder.positions("a")
    assert given is not None and torch.equal(given, positions)
    assert builder.positions("b") is None


def test_rows_are_staged_in_the_models_dtype() -> None:
    builder = OmniModelInputBuilder(torch.zeros(4, WIDTH, dtype=torch.bfloat16), max_elements=1000)
    builder.admit("a", extra(torch.full((1, WIDTH), 0.1)))
    builder.push("a", rows_of(1, torch.full((1, WIDTH), 0.3)))
    step = builder.build([TokenSpan("a", 0, 3)])
    assert step is not None and torch.equal(step[:, 0], torch.tensor([0.1, 0.3, -1.0], dtype=torch.bfloat16))


def test_rows_that_come_in_parts_of_several_dtypes_follow_each_other(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(0, 2), rows(2, 1).bfloat16(), rows(3, 3)))
    assert numbers(builder, ("a", 0, 7)) == [0, 1, 2, 3, 4, 5, -1]


def test_parts_with_a_gap_between_them_are_refused(builder: OmniModelInputBuilder) -> None:
    parts = (rows_of(0, rows(0, 2)).to_bytes(), rows_of(3, rows(3, 1)).to_bytes())
    with pytest.raises(PayloadError, match="a gap between hidden states that end at 2 and those that start at 3"):
        builder.admit("a", StageExtra("key", rows=parts))


def test_rows_above_the_limit_are_refused() -> None:
    builder = OmniModelInputBuilder(torch.zeros(4, WIDTH), max_elements=2 * WIDTH)
    builder.admit("fits", extra(rows(0, 2)))
    with pytest.raises(PayloadError, match="at most 8"):
        builder.admit("too large", extra(rows(0, 3)))
    with pytest.raises(PayloadError, match="12 elements together, but at most 8"):
        builder.admit("too large together", extra(rows(0, 2), rows(2, 1)))
    assert len(builder) == 1


def test_a_step_without_requests_is_empty(builder: OmniModelInputBuilder) -> None:
    assert builder.build([]) is None


def test_steps_of_pad_rows_alone_say_that_nothing_changed(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 2)))
    builder.admit("b", extra(rows(20, 1)))

    def changed(*spans: tuple[str, int, int]) -> bool:
        return builder.build([TokenSpan(*span) for span in spans]) is not None

    assert changed(("a", 1, 1), ("b", 1, 1))
    assert changed(("a", 2, 1), ("b", 2, 1))
    assert not changed(("a", 3, 1), ("b", 3, 1))
    assert changed(("b", 4, 1), ("a", 4, 1))
    assert changed(("a", 5, 1))
    builder.push("a", rows_of(2, rows(12, 5)))
    assert changed(("a", 6, 1))
    assert numbers(builder, ("a", 6, 1)) == [16]


def test_rows_of_further_steps_lie_behind_those_that_are_still_on_their_way(builder: OmniModelInputBuilder) -> None:
    builder.admit("a", extra(rows(10, 5)))
    builder.admit("b", extra(rows(20, 5)))
    first = builder.build([TokenSpan("a", 0, 3), TokenSpan("b", 0, 2)])
    second = builder.build([TokenSpan("a", 3, 1), TokenSpan("b", 2, 1)], is_further=True)
    third = builder.build([TokenSpan("a", 4, 1), TokenSpan("b", NOWHERE, 1)], is_further=True)
    assert first is not None and second is not None and third is not None
    assert [step[:, 0].tolist() for step in (first, second, third)] == [[10, 11, 12, 20, 21], [13, 22], [14, -1]]
    assert numbers(builder, ("a", 0, 1)) == [10] and first[0, 0] == 10


@pytest.mark.parametrize("pad", [Rows.of_ids(0, [7]), rows_of(0, PAD_ROW[None])], ids=["pad id", "pad row"])
def test_rows_and_ids_take_turns_and_each_has_nothing_where_the_other_is(
    builder: OmniModelInputBuilder, pad: Rows
) -> None:
    ids = OmniModelInputBuilder(torch.full((16, 1), 99, dtype=torch.int32), max_elements=1000, takes_ids=True)
    parts = [Rows.of_ids(0, [3]), rows_of(1, rows(11, 2)), Rows.of_ids(3, [4, NO_ID])]
    given = StageExtra("key", rows=tuple(part.to_bytes() for part in parts), pad_row=pad.to_bytes())
    later = [Rows.of_ids(5, [5]), rows_of(6, rows(16, 1)), Rows.of_ids(7, [6])]
    for each in (builder, ids):
        each.admit("a", given, expected=5)
        for part in later:
            each.push("a", part)
    is_id = pad.width == 1
    spans = [TokenSpan("plain", 0, 1), TokenSpan("a", 0, 10)]
    beside, made = ids.build(spans), builder.build(spans)
    assert beside is not None and made is not None
    assert beside[:, 0].tolist() == [NO_ID, 3, NO_ID, NO_ID, 4, NO_ID, 5, NO_ID, 6, *[7 if is_id else NO_ID] * 2]
    assert made[:, 0].tolist() == [0, 0, 11, 12, 0, 0, 0, 16, 0, *[0 if is_id else -1] * 2]
