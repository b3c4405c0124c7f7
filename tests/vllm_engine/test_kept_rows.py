"""Rows of full blocks that are kept, at their bound, and how they go out before those that are computed."""

from __future__ import annotations

import numpy as np
import torch

from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.kept_rows import EmittedRows, KeptRows
from tests.rows import rows_of

SIZE, WIDTH = 4, 6
BLOCK_BYTES = SIZE * WIDTH * 2


def rows(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.bfloat16)[:, None].repeat(1, WIDTH)


def chunk(first: int, end: int, positions: torch.Tensor | None = None) -> torch.Tensor:
    return torch.from_numpy(rows_of(first, rows(first, end), positions).pack())


def hashes(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(blocks)]


def unpacked(packed: torch.Tensor) -> Rows:
    return Rows.unpack(packed.numpy(), max_elements=10_000)


def passed(kept: KeptRows, name: str, *spans: tuple[int, int]) -> None:
    """A request whose rows were computed in these spans."""
    emitted = EmittedRows(kept)
    for first, end in spans:
        packed = chunk(first, end)
        assert emitted.pass_on(hashes(name, end // SIZE), packed) is packed


def test_what_was_computed_is_covered_once_its_block_is_full() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    passed(kept, "a", (0, 7))
    assert kept.covered(hashes("a", 3)) == 1
    passed(kept, "b", (0, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12))
    assert kept.covered(hashes("b", 4)) == 3 and kept.num_bytes == 4 * BLOCK_BYTES


def test_rows_that_are_known_already_are_kept_once() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    for _ in range(2):
        passed(kept, "a", (0, 9))
    assert kept.num_bytes == 2 * BLOCK_BYTES


def test_cached_rows_go_out_first_in_one_chunk_with_the_positions() -> None:
    kept, positions = KeptRows(10 * BLOCK_BYTES, SIZE), torch.arange(30).view(3, 10)
    passed(kept, "a", (0, 10))
    emitted = EmittedRows(kept)
    emitted.begin(hashes("a", 2))
    first = unpacked(emitted.pass_on(hashes("a", 2), chunk(8, 10, positions)))
    assert (first.start, first.end) == (0, 10)
    assert torch.equal(first.tensor(), rows(0, 10))
    assert np.array_equal(first.positions, positions.numpy())
    later = chunk(10, 11)
    assert emitted.pass_on(hashes("a", 2), later) is later


def test_what_was_taken_goes_out_though_it_is_dropped_meanwhile() -> None:
    kept = KeptRows(2 * BLOCK_BYTES, SIZE)
    passed(kept, "a", (0, 8))
    emitted = EmittedRows(kept)
    emitted.begin(hashes("a", 2))
    passed(kept, "b", (0, 8))
    assert kept.covered(hashes("a", 2)) == 0
    assert torch.equal(unpacked(emitted.pass_on(hashes("a", 2), chunk(8, 9))).tensor(), rows(0, 9))


def announced(kept: KeptRows, name: str, first: int, end: int, prompt_blocks: int, least: int = 2) -> EmittedRows:
    """A request whose rows from `first` on were computed; what is before it the cache had."""
    emitted = EmittedRows(kept, prompt_blocks, least)
    emitted.begin(hashes(name, first // SIZE))
    emitted.pass_on(hashes(name, end // SIZE), chunk(first, end))
    return emitted


def test_rows_that_went_out_with_a_prompt_are_left_out_of_the_next_one() -> None:
    kept, positions = KeptRows(10 * BLOCK_BYTES, SIZE), torch.arange(39).view(3, 13)
    announced(kept, "a", 0, 11, prompt_blocks=2)
    emitted = EmittedRows(kept, prompt_blocks=3, least_left_out=2)
    emitted.begin(hashes("a", 2))
    first = chunk(8, 13, positions)
    assert emitted.pass_on(hashes("a", 3), first) is first
    found = kept.find(hashes("a", 2))
    assert found is not None and (found.view("uint16") == rows(0, 8).view(torch.uint16).numpy()).all()


def test_rows_of_a_reply_go_out_once_when_they_are_part_of_a_prompt() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 17, prompt_blocks=2)  # its last two blocks are the reply's
    emitted = EmittedRows(kept, prompt_blocks=4, least_left_out=2)
    emitted.begin(hashes("a", 4))
    first = unpacked(emitted.pass_on(hashes("a", 4), chunk(16, 18)))
    assert (first.start, first.end) == (8, 18) and torch.equal(first.tensor(), rows(8, 18))
    again = EmittedRows(kept, prompt_blocks=4, least_left_out=2)
    again.begin(hashes("a", 4))
    assert unpacked(again.pass_on(hashes("a", 4), chunk(16, 18))).start == 16


def test_few_rows_go_out_again() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 9, prompt_blocks=2)
    emitted = EmittedRows(kept, prompt_blocks=2, least_left_out=3)
    emitted.begin(hashes("a", 2))
    assert unpacked(emitted.pass_on(hashes("a", 2), chunk(8, 9))).start == 0


def test_left_out_rows_stay_at_the_bound_until_all_that_left_them_out_have_ended() -> None:
    kept = KeptRows(3 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 9, prompt_blocks=2)
    emitted = [announced(kept, "a", 8, 9, prompt_blocks=2) for _ in range(2)]
    for each in emitted:
        for name in "bcd":
            passed(kept, name, (0, 8))
            assert kept.find(hashes("a", 2)) is not None and kept.covered(hashes(name, 2)) == 1
            assert kept.num_bytes == 3 * BLOCK_BYTES
        each.end(hashes("a", 2))
    passed(kept, "b", (0, 8))
    passed(kept, "c", (0, 8))
    assert kept.find(hashes("a", 2)) is None and kept.find(hashes("c", 2)) is not None


def test_nothing_new_is_kept_where_all_that_is_kept_is_held() -> None:
    kept = KeptRows(2 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 9, prompt_blocks=2)
    emitted = announced(kept, "a", 8, 9, prompt_blocks=2)
    passed(kept, "b", (0, 8))
    assert (kept.covered(hashes("a", 2)), kept.covered(hashes("b", 2))) == (2, 0)
    emitted.end(hashes("a", 2))
    passed(kept, "b", (0, 8))
    assert (kept.covered(hashes("a", 2)), kept.covered(hashes("b", 2))) == (0, 2)


def test_what_is_left_out_is_decided_as_a_request_begins_for_the_first_time() -> None:
    """Another one has computed, and announced, more of the prompt before this one begins again after a preemption."""
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 8, prompt_blocks=4)
    emitted = EmittedRows(kept, prompt_blocks=4, least_left_out=2)
    emitted.begin(hashes("a", 2))
    assert unpacked(emitted.pass_on(hashes("a", 4), chunk(8, 10))).start == 8
    announced(kept, "a", 8, 17, prompt_blocks=4)
    emitted.begin(hashes("a", 4))
    again = unpacked(emitted.pass_on(hashes("a", 4), chunk(16, 17)))
    assert (again.start, again.end) == (0, 17) and torch.equal(again.tensor(), rows(0, 17))


def test_what_was_dropped_is_told_again() -> None:
    kept = KeptRows(2 * BLOCK_BYTES, SIZE)
    announced(kept, "a", 0, 9, prompt_blocks=2)
    passed(kept, "b", (0, 8))
    announced(kept, "a", 0, 9, prompt_blocks=0)  # as a reply
    assert kept.covered(hashes("a", 2)) == 2 and kept.announced(hashes("a", 2)) == 0


def test_at_the_bound_the_end_of_what_was_used_least_recently_goes_first() -> None:
    kept = KeptRows(6 * BLOCK_BYTES, SIZE)
    for name in "abc":
        passed(kept, name, (0, 2 * SIZE))
    kept.read(hashes("a", 2))
    kept.use(hashes("b", 2))
    kept.use(hashes("c", 2))
    passed(kept, "d", (0, SIZE))
    assert [kept.covered(hashes(name, 2)) for name in "abcd"] == [1, 2, 2, 1]
    assert kept.num_bytes == 6 * BLOCK_BYTES


def test_of_a_prompt_above_the_bound_the_beginning_is_kept() -> None:
    kept = KeptRows(3 * BLOCK_BYTES + 1, SIZE)
    passed(kept, "a", (0, 2 * SIZE))
    passed(kept, "b", (0, 2 * SIZE), *((i, i + 1) for i in range(2 * SIZE, 10 * SIZE)))
    assert kept.covered(hashes("b", 10)) == 3 and kept.covered(hashes("a", 2)) == 0
    assert kept.num_bytes == 3 * BLOCK_BYTES


def test_a_kept_block_holds_no_more_memory_than_its_own() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    passed(kept, "a", (0, 4 * SIZE + 1))
    assert {block.base is None or block.base.nbytes for block in kept.read(hashes("a", 4))} <= {True, BLOCK_BYTES}


def test_rows_that_do_not_begin_at_a_block_are_kept_from_the_next_one_on() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    passed(kept, "a", (SIZE + 1, 2 * SIZE + 1), (2 * SIZE + 1, 3 * SIZE))
    assert kept.num_bytes == BLOCK_BYTES
    passed(kept, "a", (0, 2 * SIZE))
    assert kept.covered(hashes("a", 3)) == 3


def test_a_request_that_begins_again_is_kept_from_there() -> None:
    kept = KeptRows(10 * BLOCK_BYTES, SIZE)
    passed(kept, "a", (0, 6), (0, 3), (3, 9))
    assert kept.covered(hashes("a", 2)) == 2
    assert (kept.read(hashes("a", 2))[1].view("uint16") == rows(4, 8).view(torch.uint16).numpy()).all()
