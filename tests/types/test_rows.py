from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from omni_cluster.types.errors import PayloadError
from omni_cluster.types.inputs import EXTRA_KEY, StageExtra
from omni_cluster.types.rows import (
    HASH_BYTES,
    HEADER,
    IDS,
    ITEM_BYTES,
    MAGIC,
    NO_ID,
    PrefixHashes,
    Rows,
    check_together,
)
from tests.rows import KIND, rows_of

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KIND_FIELD = 1
"""Of the header; the others but the mark are numbers."""

dtypes = st.sampled_from([getattr(torch, name) for name in ITEM_BYTES])
odd_numbers = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64, 10**4000, -(10**4000)]),
    st.integers(-(2**70), 2**70),
)
garbage = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, st.floats(), st.text(max_size=8), st.binary(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def hashes(count: int) -> tuple[bytes, ...]:
    return tuple(bytes([i + 1]) * HASH_BYTES for i in range(count))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def assert_same(left: Rows, right: Rows) -> None:
    assert (left.kind, left.dtype, left.start, left.prefix) == (right.kind, right.dtype, right.start, right.prefix)
    assert np.array_equal(left.raw, right.raw) and left.raw.shape == right.raw.shape
    assert (left.positions is None) == (right.positions is None)
    assert left.positions is None or np.array_equal(left.positions, right.positions)
    assert (left.mask is None) == (right.mask is None)
    assert left.mask is None or np.array_equal(left.mask, right.mask)


some_rows = st.builds(
    lambda start, places, width, dtype, positions, prefix: rows_of(
        start,
        tensor_of((places if isinstance(places, int) else sum(places), width), dtype),
        None if positions is None else tensor_of((3, positions), torch.int64),
        prefix=prefix,
        mask=None if isinstance(places, int) else np.array(places, np.bool_),
    ),
    st.integers(0, 1000),
    st.one_of(st.integers(0, 7), st.lists(st.booleans(), max_size=7)),
    st.integers(0, 5),
    dtypes,
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.builds(lambda n: PrefixHashes(16, hashes(n)), st.integers(0, 3))),
)


def with_field(packed: np.ndarray, place: int, value: int | bytes) -> np.ndarray:
    fields = list(HEADER.unpack_from(packed))
    fields[place] = value
    return np.concatenate([np.frombuffer(HEADER.pack(*fields), np.uint8), packed[HEADER.size :]])


def first_rows() -> Rows:
    return rows_of(0, torch.ones(2, 4), torch.ones(3, 2, dtype=torch.int64), prefix=PrefixHashes(16, hashes(1)))


class TestPacked:
    @SETTINGS
    @given(some_rows, dtypes)
    def test_rows_come_back_as_they_were(self, rows: Rows, dtype: torch.dtype) -> None:
        for packed in (rows.pack(), rows.to_bytes()):
            back = Rows.unpack(packed, max_elements=1000)
            assert_same(back, rows)
            assert same(back.tensor(), rows.tensor()) and back.num_elements == rows.num_elements

    def test_another_reader_finds_a_header_and_the_bytes_behind_it(self) -> None:
        made = rows_of(7, torch.tensor([[1.0, 2.0, 3.0]]), torch.arange(6).view(3, 2)).to_bytes()
        magic, kind, code, *numbers = HEADER.unpack_from(made)
        assert (magic, kind.rstrip(b"\0"), code) == (MAGIC, KIND.encode(), list(ITEM_BYTES).index("float32"))
        assert numbers == [7, 1, 3, 2, -1, 0, -1]
        assert np.frombuffer(made, np.float32, 3, HEADER.size).tolist() == [1, 2, 3]
        assert np.frombuffer(made, np.int64, 6, HEADER.size + 16).tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_every_bit_survives_including_nan_and_infinity(self, dtype: torch.dtype) -> None:
        tensor = torch.tensor([[math.nan, math.inf, -math.inf, -0.0, 1e-7, 3.14159]], dtype=dtype)
        back = Rows.unpack(rows_of(0, tensor).to_bytes(), max_elements=6).tensor()
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))

    def test_a_transposed_tensor_that_wants_gradients_is_packed_in_order(self) -> None:
        tensor = torch.arange(6.0).view(2, 3).requires_grad_().t()
        assert same(Rows.unpack(rows_of(0, tensor).pack(), max_elements=6).tensor(), tensor.detach())

    def test_unpacked_parts_are_views_and_packed_again_they_are_what_they_came_as(self) -> None:
        packed = rows_of(0, torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.int64)).pack()
        rows = Rows.unpack(packed, max_elements=100)
        assert rows.pack() is packed
        packed[HEADER.size :] = 0
        assert not rows.raw.any() and rows.positions is not None and not rows.positions.any()

    @pytest.mark.parametrize("offset", range(1, 8))
    def test_packed_rows_at_an_odd_address_are_read_too(self, offset: int) -> None:
        rows = rows_of(3, torch.arange(10.0).view(2, 5))
        moved = np.concatenate([np.zeros(offset, np.uint8), rows.pack()])[offset:]
        assert same(Rows.unpack(moved, max_elements=10).tensor(), rows.tensor())

    @SETTINGS
    @given(some_rows, st.integers(2, 9), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9) | st.just(2**62))
    def test_a_field_of_the_header_that_lies(self, rows: Rows, place: int, value: int) -> None:
        packed = with_field(rows.pack(), place, value)
        try:
            back = Rows.unpack(packed, max_elements=1000)
        except PayloadError as error:
            assert str(error).endswith(".")
            return
        assert back.raw.nbytes <= len(packed) - HEADER.size

    @pytest.mark.parametrize(
        ("place", "value", "words"),
        [
            (0, b"OmniRow\x03", "mark"),
            (1, b"", "kind of hidden states is ''"),
            (1, b"\xff", "kind of hidden states is"),
            (1, b"a\nb", "kind of hidden states is"),
            (2, len(ITEM_BYTES), f"dtype code {len(ITEM_BYTES)}"),
            (2, -1, "dtype code -1"),
            (3, -1, "start at -1"),
            (3, 2**62, "start at"),
            (4, -1, "negative"),
            (4, 2**62, "above"),
            (4, 3, "header says"),
            (5, 2**39, "elements"),
            (5, 5, "header says"),
            (6, -2, "-2 positions"),
            (6, 2**62, "above"),
            (6, 1, "header says"),
            (7, -2, "-2 hashes"),
            (7, 2**62, "above"),
            (7, 2, "header says"),
            (8, 0, "have 0 positions"),
            (8, 2**62, "positions, but"),
            (9, -2, "mask of -2 positions"),
            (9, 2**62, "above"),
            (9, 1, "header says"),
        ],
    )
    def test_each_field_is_checked_by_name(self, place: int, value: int | bytes, words: str) -> None:
        with pytest.raises(PayloadError, match=words) as refused:
            Rows.unpack(with_field(first_rows().pack(), place, value), max_elements=100)
        assert str(refused.value).endswith(".")

    def test_the_limit_holds_for_rows_positions_and_hashes_together(self) -> None:
        packed = first_rows().pack()
        assert Rows.unpack(packed, max_elements=14 + HASH_BYTES).end == 2
        with pytest.raises(PayloadError, match="46 elements"):
            Rows.unpack(packed, max_elements=13 + HASH_BYTES)

    @SETTINGS
    @given(some_rows, st.data())
    def test_truncated_rows_are_refused(self, rows: Rows, data: st.DataObject) -> None:
        packed = rows.pack()
        kept = data.draw(st.integers(0, len(packed) - 1))
        from_start = data.draw(st.booleans())
        with pytest.raises(PayloadError):
            Rows.unpack(packed[:kept] if from_start else packed[len(packed) - kept :], max_elements=1000)

    @SETTINGS
    @given(some_rows, st.data())
    def test_a_flipped_bit_of_the_header_brings_no_other_error(self, rows: Rows, data: st.DataObject) -> None:
        packed = rows.pack().copy()
        bit = data.draw(st.integers(0, HEADER.size * 8 - 1))
        packed[bit // 8] ^= 1 << (bit % 8)
        try:
            Rows.unpack(packed, max_elements=1000)
        except PayloadError:
            return
        assert bit // 64 != 0, "a mark with a flipped bit was accepted"

    @SETTINGS
    @given(st.binary(max_size=200))
    def test_no_bytes_bring_anything_but_a_payload_error(self, data: bytes) -> None:
        for packed in (data, MAGIC + data):
            with pytest.raises(PayloadError):
                Rows.unpack(packed, max_elements=24)

    @pytest.mark.parametrize("packed", [np.zeros(64), np.zeros((8, 80), np.uint8), np.array(["a"])])
    def test_only_flat_bytes_are_unpacked(self, packed: np.ndarray) -> None:
        with pytest.raises(PayloadError, match="one dimension of uint8"):
            Rows.unpack(packed, max_elements=1000)


class TestRows:
    @pytest.mark.parametrize(
        ("start", "rows", "positions", "words"),
        [
            (-1, torch.ones(1, 1), None, "start"),
            (0, torch.ones(3), None, r"\[n, H\]"),
            (0, torch.ones(1, 1, dtype=torch.float64), None, "float64"),
            (0, torch.ones(1, 1), torch.ones(3, 1), "int64"),
            (0, torch.ones(1, 1), torch.ones(2, 1, dtype=torch.int64), r"\[3, P\]"),
        ],
    )
    def test_rows_of_another_form_cannot_be_made(
        self, start: int, rows: torch.Tensor, positions: torch.Tensor | None, words: str
    ) -> None:
        with pytest.raises(PayloadError, match=words):
            rows_of(start, rows, positions)

    @pytest.mark.parametrize("kind", ["", "a" * 17, "\u00e9"])
    def test_a_kind_has_a_short_name_in_ascii(self, kind: str) -> None:
        with pytest.raises(PayloadError, match="1 to 16 letters of ASCII"):
            Rows.of(kind, 0, torch.ones(1, 1))

    @pytest.mark.parametrize(
        ("block_size", "hashes", "words"),
        [(0, (), "have 0 positions"), (16, (b"short",), "32 bytes"), (16, (bytes(33),), "32 bytes")],
    )
    def test_hashes_of_another_form_do_not_travel(self, block_size: int, hashes: tuple[bytes, ...], words: str) -> None:
        with pytest.raises(PayloadError, match=words):
            rows_of(0, torch.ones(1, 1), prefix=PrefixHashes(block_size, hashes))

    @SETTINGS
    @given(some_rows, st.integers(0, 1010))
    def test_a_position_cuts_rows_in_two(self, rows: Rows, position: int) -> None:
        before, after = rows.before(position), rows.after(position)
        assert (before is None or before.end <= position) and (after is None or after.start >= position)
        parts = [part for part in (before, after) if part is not None]
        if rows.end > rows.start:
            assert_same(Rows.joined(parts), rows)
            assert np.array_equal(np.concatenate([part.at for part in parts]), rows.at)

    def test_rows_that_come_twice_are_dropped(self) -> None:
        rows = rows_of(4, torch.ones(3, 2))
        assert rows.after(rows.end) is None and rows.before(rows.start) is None
        assert rows.after(rows.start) is rows and rows.before(rows.end) is rows

    def test_what_came_with_the_first_rows_stays_with_them(self) -> None:
        rows = first_rows()
        before, rest = rows.before(1), rows.after(1)
        assert before is not None and before.positions is not None and before.prefix == rows.prefix
        assert rest is not None and rest.positions is None and rest.prefix is None
        bare = rows.without_facts()
        assert bare.positions is None and bare.prefix is None and bare.without_facts() is bare

    @SETTINGS
    @given(some_rows, st.integers(0, 9))
    def test_moved_rows_are_packed_with_their_new_place(self, rows: Rows, by: int) -> None:
        moved = Rows.unpack(Rows.unpack(rows.pack(), max_elements=1000).moved(by).pack(), max_elements=1000)
        assert_same(moved, replace(rows, start=rows.start + by))

    @SETTINGS
    @given(some_rows, st.lists(st.integers(0, 7), max_size=3))
    def test_rows_cut_anywhere_join_to_themselves(self, rows: Rows, cuts: list[int]) -> None:
        count, places, mask = rows.end - rows.start, rows.at - rows.start, rows.mask
        edges = [0, *sorted(min(cut, count) for cut in cuts), count]
        parts = [
            replace(
                rows if index == 0 else rows.without_facts(),
                start=rows.start + low,
                raw=rows.raw[(low <= places) & (places < high)],
                mask=None if mask is None else mask[low:high],
            )
            for index, (low, high) in enumerate(pairwise(edges))
        ]
        joined = Rows.joined(parts)
        assert_same(joined, rows)
        assert_same(Rows.unpack(joined.pack(), max_elements=1000), rows)

    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ([], "no hidden states"),
            ([rows_of(0, torch.ones(2, 1)), rows_of(3, torch.ones(1, 1))], "a gap .* end at 2 .* start at 3"),
            ([rows_of(0, torch.ones(2, 1)), rows_of(1, torch.ones(1, 1))], "an overlap .* end at 2 .* start at 1"),
            ([rows_of(0, torch.ones(2, 1)), rows_of(2, torch.ones(1, 2))], r"shape \[1, 2\], but .* \[n, 1\]"),
            (
                [rows_of(0, torch.ones(3, 0)), rows_of(3, torch.ones(3, 4))],
                r"\[3, 4\].* cannot follow those of .*\[3, 0\]",
            ),
            ([rows_of(0, torch.ones(2, 1)), rows_of(2, torch.ones(1, 1).half())], "float16 cannot follow"),
            ([rows_of(0, torch.ones(2, 1)), Rows.of("other", 2, torch.ones(1, 1))], "'other'.* cannot follow"),
            (
                [rows_of(0, torch.ones(2, 1)), rows_of(2, torch.ones(1, 1), torch.ones(3, 1, dtype=torch.int64))],
                "hidden states at 2 bring positions",
            ),
            (
                [rows_of(0, torch.ones(2, 1)), rows_of(2, torch.ones(1, 1), prefix=PrefixHashes(16, ()))],
                "hidden states at 2 bring a prompt's hashes",
            ),
        ],
    )
    def test_rows_that_do_not_follow_are_refused(self, parts: list[Rows], words: str) -> None:
        with pytest.raises(PayloadError, match=words):
            Rows.joined(parts)

    @SETTINGS
    @given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), dtypes, st.booleans())
    def test_rows_go_out_behind_those_before_them(
        self, before: int, length: int, width: int, dtype: torch.dtype, is_first: bool
    ) -> None:
        tensor = tensor_of((before + length, width), dtype)
        positions = tensor_of((3, before + length), torch.int64, 1) if is_first else None
        prefix = PrefixHashes(2, hashes(2)) if is_first else None
        whole = rows_of(4, tensor, positions, prefix=prefix)
        rest = rows_of(4 + before, tensor[before:], positions, prefix=prefix)
        assert np.array_equal(rest.preceded_by([whole.raw[:1][:before], whole.raw[1:before]]).pack(), whole.pack())

    def test_rows_of_some_positions_go_out_behind_those_of_all(self) -> None:
        tensor, mask = torch.arange(10.0).view(5, 2), np.array([True, True, False, False, True])
        rest = rows_of(6, tensor[2:3], torch.ones(3, 9, dtype=torch.int64), mask=mask[2:])
        whole = rest.preceded_by([rows_of(0, tensor[:2]).raw])
        assert (whole.start, whole.end, whole.at.tolist()) == (4, 9, [4, 5, 8])
        assert torch.equal(whole.tensor(), tensor[:3]) and np.array_equal(whole.mask, mask)
        without = rest.preceded_by([], np.zeros(4, np.bool_))
        assert (without.start, without.at.tolist()) == (2, [8]) and without.positions is not None
        assert_same(Rows.unpack(without.pack(), max_elements=100), without)

    def test_a_mask_has_as_many_positions_as_there_are_rows(self) -> None:
        with pytest.raises(PayloadError, match="2 hidden states, but a mask of 1 positions"):
            rows_of(0, torch.ones(2, 1), mask=np.array([True, False]))
        packed = rows_of(0, torch.ones(1, 1), mask=np.array([True, False])).pack().copy()
        packed[-1] = 2
        with pytest.raises(PayloadError, match="mask with 2"):
            Rows.unpack(packed, max_elements=100)

    def test_parts_of_several_dtypes_go_together_up_to_the_limit(self) -> None:
        parts = [first_rows(), rows_of(2, torch.ones(1, 4).half()), rows_of(3, torch.ones(2, 4))]
        check_together(parts, 14 + HASH_BYTES + 12)
        check_together([], 0)
        with pytest.raises(PayloadError, match="58 elements together, but at most 57"):
            check_together(parts, 57)
        with pytest.raises(PayloadError, match="a gap"):
            check_together(parts[::2], 1000)
        with pytest.raises(PayloadError, match="from 2 to 4 are of some positions alone"):
            check_together([parts[0], rows_of(2, torch.ones(1, 4), mask=np.array([False, True]))], 1000)
        with pytest.raises(PayloadError, match=r"shape \[2, 0\], but each has one element or more"):
            check_together([rows_of(0, torch.ones(2, 0))], 1000)

    def test_rows_and_ids_follow_each_other_and_rows_keep_their_width(self) -> None:
        ids, others = Rows.of_ids(2, [NO_ID, 70_000]), rows_of(4, torch.ones(1, 4))
        assert (ids.tensor().tolist(), ids.end) == ([[NO_ID], [70_000]], 4)
        assert Rows.unpack(ids.to_bytes(), max_elements=2).kind == IDS
        check_together([first_rows(), ids, others], 1000)
        check_together([ids, others], 1000)
        with pytest.raises(PayloadError, match=r"shape \[1, 3\], but those before them are \[n, 4\]"):
            check_together([first_rows(), ids, rows_of(4, torch.ones(1, 3))], 1000)
        with pytest.raises(PayloadError, match=r"Ids are 'ids', \[1, 2\] of int32, but they must be \[n, 1\] of int32"):
            Rows(IDS, "int32", 0, np.zeros((1, 8), np.uint8))


def test_of_a_prompt_s_blocks_those_before_a_position_are_named() -> None:
    prefix = PrefixHashes(4, hashes(3))
    assert [prefix.blocks_in(position) for position in (0, 3, 4, 11, 12, 100)] == [0, 0, 1, 2, 3, 3]
    assert prefix.up_to(9) == PrefixHashes(4, hashes(2))


def hop(wire: Any) -> Any:
    """As vLLM carries it to an engine: MessagePack that knows no types of ours."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(wire))


class TestStageExtra:
    def test_it_passes_through_an_untyped_msgpack_hop(self) -> None:
        parts = (first_rows().to_bytes(), rows_of(2, torch.ones(1, 4).half()).to_bytes())
        extra = StageExtra("a", emit_rows=True, rows=parts, pad_row=rows_of(0, torch.ones(1, 4)).to_bytes())
        assert StageExtra.of(hop(extra.to_extra_args())) == extra

    def test_another_reader_of_messagepack_reads_what_goes_to_an_engine(self) -> None:
        extra = StageExtra("a", emit_rows=True, rows=(first_rows().to_bytes(),))
        read = msgpack.unpackb(msgspec.msgpack.encode(extra.to_extra_args()))[EXTRA_KEY]
        assert (read["key"], read["emit_rows"], read["rows_complete"], read["pad_row"]) == ("a", True, False, b"")
        assert_same(Rows.unpack(read["rows"][0], max_elements=100), first_rows())

    @SETTINGS
    @given(st.sampled_from(["rows", "pad_row"]), garbage)
    def test_garbage_from_the_wire_is_refused(self, field: str, value: Any) -> None:
        assume(not isinstance(value, (bytes, list)))
        with pytest.raises(msgspec.ValidationError):
            StageExtra.of({EXTRA_KEY: {"key": "a", field: value}})
