from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgpack
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from omni_cluster.errors import PayloadError
from omni_cluster.inputs import EXTRA_KEY, StageExtra
from omni_cluster.rows import (
    HASH_BYTES,
    ITEM_BYTES,
    AdditionalInformationPayload,
    PackedRows,
    PrefixHashes,
    PromptEmbedsPayload,
    RowsChunk,
)

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TRAILER_BYTES = 64

dtypes = st.sampled_from([getattr(torch, name) for name in ITEM_BYTES])
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
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


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def hop(wire: Any) -> Any:
    """As vLLM carries it to an engine: MessagePack that knows no types of ours."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(wire))


def test_another_reader_of_messagepack_reads_what_goes_to_an_engine() -> None:
    extra = StageExtra("a", emit_rows=True, prompt_embeds=PromptEmbedsPayload.from_tensor(torch.ones(1, 2)))
    read = msgpack.unpackb(msgspec.msgpack.encode(extra.to_extra_args()))[EXTRA_KEY]
    assert (read["key"], read["emit_rows"], read["rows_complete"]) == ("a", True, False)
    assert read["prompt_embeds"] == {"data": b"\0\0\x80?" * 2, "shape": [1, 2], "dtype": "float32"}


def extra_of(wire: Any) -> StageExtra:
    extra = StageExtra.of({EXTRA_KEY: wire})
    assert extra is not None
    return extra


def wire_of(payload: PromptEmbedsPayload) -> dict[str, Any]:
    wire: dict[str, Any] = StageExtra("a", prompt_embeds=payload).to_extra_args()[EXTRA_KEY]["prompt_embeds"]
    return wire


def arrived(wire: Any) -> PromptEmbedsPayload:
    payload = extra_of({"key": "a", "prompt_embeds": wire}).prompt_embeds
    assert payload is not None
    return payload


class TestPromptEmbedsPayload:
    @SETTINGS
    @given(shapes, dtypes, st.integers(0, 99))
    def test_a_tensor_comes_back_equal(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        tensor = tensor_of(shape, dtype, seed)
        payload = PromptEmbedsPayload.from_tensor(tensor)
        assert same(payload.to_tensor(max_elements=tensor.numel()), tensor)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_every_bit_survives_including_nan_and_infinity(self, dtype: torch.dtype) -> None:
        tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-7, 3.14159], dtype=dtype)
        back = PromptEmbedsPayload.from_tensor(tensor).to_tensor(max_elements=6)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))

    def test_a_transposed_tensor_that_wants_gradients_is_copied_in_order(self) -> None:
        tensor = torch.arange(6.0).view(2, 3).requires_grad_().t()
        assert same(PromptEmbedsPayload.from_tensor(tensor).to_tensor(max_elements=6), tensor.detach())

    def test_the_result_owns_writable_memory(self) -> None:
        payload = PromptEmbedsPayload.from_tensor(torch.ones(4))
        payload.to_tensor(max_elements=4).zero_()
        assert payload.to_tensor(max_elements=4).tolist() == [1.0] * 4

    @SETTINGS
    @given(shapes, dtypes)
    def test_it_passes_through_an_untyped_msgpack_hop(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        payload = PromptEmbedsPayload.from_tensor(tensor_of(shape, dtype))
        assert arrived(hop(wire_of(payload))) == payload

    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            (torch.zeros(2, dtype=torch.bool), "torch.bool"),
            (torch.zeros(2, dtype=torch.float64), "torch.float64"),
            (torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
            (torch.tensor(1.0), "0 dimensions"),
            (torch.zeros(1, 1, 1, 1, 1), "5 dimensions"),
            (torch.zeros(2, 2).to_sparse(), "dense"),
            (torch.zeros(2, device="meta"), "dense"),
        ],
    )
    def test_what_is_not_carried_is_refused(self, tensor: torch.Tensor, words: str) -> None:
        with pytest.raises(PayloadError, match=words):
            PromptEmbedsPayload.from_tensor(tensor)

    @pytest.mark.parametrize(
        ("data", "shape", "dtype", "words"),
        [
            (b"", (), "float32", "0 dimensions"),
            (b"", (1, 1, 1, 1, 1), "float32", "5 dimensions"),
            (b"", (-1,), "float32", "negative"),
            (b"", (-2, -2), "float32", "negative"),
            (b"", (2**62,), "float32", "above"),
            (b"", (2**32, 2**32), "uint8", "places"),
            (b"", (0, 2**62, 2**62), "float32", "above"),
            (b"", (0, 2**30, 2**30, 2**30), "float32", "places"),
            (b"", (2**30,), "float32", "at most 1000"),
            (b"", (10**5000,), "float32", "above"),
            (b"1234", (2,), "float32", "has 4 bytes"),
            (b"123456789", (2,), "float32", "has 9 bytes"),
            (b"1", (0,), "float32", "has 1 bytes"),
            (b"1", (1,), "bool", "'bool' is not carried"),
            (b"1", (1,), "object", "'object' is not carried"),
            (b"12345678", (1,), "__class__", "is not carried"),
        ],
    )
    def test_a_header_that_lies_is_refused(self, data: bytes, shape: tuple[int, ...], dtype: str, words: str) -> None:
        with pytest.raises(PayloadError, match=words) as caught:
            PromptEmbedsPayload(data=data, shape=shape, dtype=dtype).to_tensor(max_elements=1000)
        assert str(caught.value).endswith(".")

    @SETTINGS
    @given(st.binary(max_size=24), st.lists(odd_numbers, max_size=6).map(tuple), st.text(max_size=9), st.booleans())
    def test_no_header_brings_anything_but_a_payload_error(
        self, data: bytes, shape: tuple[int, ...], dtype: str, known: bool
    ) -> None:
        payload = PromptEmbedsPayload(data=data, shape=shape, dtype="uint8" if known else dtype)
        try:
            tensor = payload.to_tensor(max_elements=24)
        except PayloadError:
            return
        assert tensor.numel() * tensor.element_size() == len(data)

    @SETTINGS
    @given(garbage)
    def test_garbage_from_the_wire_is_refused(self, obj: Any) -> None:
        assume(obj is not None)  # no payload
        with pytest.raises(msgspec.ValidationError):
            arrived(obj)

    @SETTINGS
    @given(st.sampled_from(["data", "shape", "dtype"]), garbage)
    def test_one_field_replaced_by_garbage(self, field: str, value: Any) -> None:
        wire = wire_of(PromptEmbedsPayload.from_tensor(torch.ones(2, 2))) | {field: value}
        try:
            payload = arrived(wire)
            tensor = payload.to_tensor(max_elements=4)
        except (PayloadError, msgspec.ValidationError):
            return
        assert tensor.numel() * tensor.element_size() == len(payload.data)

    @pytest.mark.parametrize("field", ["data", "shape", "dtype"])
    def test_a_missing_field_is_named(self, field: str) -> None:
        wire = wire_of(PromptEmbedsPayload.from_tensor(torch.ones(2)))
        del wire[field]
        with pytest.raises(msgspec.ValidationError, match=field):
            arrived(wire)

    def test_types_are_not_coerced(self) -> None:
        wire = wire_of(PromptEmbedsPayload.from_tensor(torch.ones(1)))
        for change in ({"data": "AACAPw=="}, {"shape": [True]}, {"shape": [1.0]}, {"shape": ["1"]}, {"more": 1}):
            with pytest.raises(msgspec.ValidationError):
                arrived(wire | change)


named = st.dictionaries(st.text(max_size=6), st.tuples(shapes, dtypes).map(lambda made: tensor_of(*made)), max_size=4)


class TestAdditionalInformationPayload:
    @SETTINGS
    @given(named)
    def test_tensors_come_back_by_name(self, given_tensors: dict[str, torch.Tensor]) -> None:
        payload = AdditionalInformationPayload.from_mapping(given_tensors)
        taken = extra_of(
            hop({"key": "a", "additional_information": msgspec.to_builtins(payload, builtin_types=(bytes,))})
        )
        assert taken.additional_information == payload
        back = payload.to_mapping(max_elements=10**5)
        assert back.keys() == given_tensors.keys()
        assert all(same(back[name], tensor) for name, tensor in given_tensors.items())

    def test_the_limit_holds_for_the_sum(self) -> None:
        payload = AdditionalInformationPayload.from_mapping({"a": torch.ones(2, 3), "b": torch.ones(4)})
        assert len(payload.to_mapping(max_elements=10)) == 2
        with pytest.raises(PayloadError, match="10 elements together"):
            payload.to_mapping(max_elements=9)

    def test_a_wrong_tensor_is_found_before_any_is_made(self) -> None:
        bad = PromptEmbedsPayload(data=b"", shape=(2**62,), dtype="float32")
        with pytest.raises(PayloadError, match="above"):
            AdditionalInformationPayload(entries={"a": bad}).to_mapping(max_elements=10)

    @SETTINGS
    @given(garbage)
    def test_garbage_from_the_wire_is_refused(self, obj: Any) -> None:
        assume(obj is not None)  # no information
        for wire in (obj, {"entries": {"a": obj}}):
            with pytest.raises(msgspec.ValidationError):
                extra_of({"key": "a", "additional_information": wire})


chunks = st.builds(
    lambda start, n, width, dtype, positions, prefix: RowsChunk(
        start,
        tensor_of((n, width), dtype),
        None if positions is None else tensor_of((3, positions), torch.int64),
        prefix=prefix,
    ),
    st.integers(0, 1000),
    st.integers(0, 7),
    st.integers(0, 5),
    dtypes,
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.builds(lambda n: PrefixHashes(16, hashes(n)), st.integers(0, 3))),
)


def hashes(count: int) -> tuple[bytes, ...]:
    return tuple(bytes([i + 1]) * HASH_BYTES for i in range(count))


def with_field(packed: torch.Tensor, place: int, value: int) -> torch.Tensor:
    changed = packed.clone()
    changed[-TRAILER_BYTES:].view(torch.int64)[place] = value
    return changed


class TestRowsChunk:
    @SETTINGS
    @given(chunks)
    def test_a_packed_chunk_comes_back_equal(self, chunk: RowsChunk) -> None:
        back = RowsChunk.unpack(chunk.pack(), max_elements=1000)
        assert back.start == chunk.start
        assert same(back.rows, chunk.rows)
        assert back.prefix == chunk.prefix
        assert (back.positions is None) == (chunk.positions is None)
        if back.positions is not None and chunk.positions is not None:
            assert same(back.positions, chunk.positions)

    def test_unpacked_parts_are_views(self) -> None:
        packed = RowsChunk(0, torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.int64)).pack()
        chunk = RowsChunk.unpack(packed, max_elements=100)
        packed[:-TRAILER_BYTES] = 0
        assert chunk.rows.eq(0).all()
        assert chunk.positions is not None and chunk.positions.eq(0).all()

    def test_rows_that_are_a_transposed_view_are_packed_in_order(self) -> None:
        rows = torch.arange(6.0).view(2, 3).t()
        assert same(RowsChunk.unpack(RowsChunk(0, rows).pack(), max_elements=6).rows, rows)

    @pytest.mark.parametrize("offset", range(1, 8))
    def test_a_packed_tensor_at_an_odd_address_is_read_too(self, offset: int) -> None:
        chunk = RowsChunk(3, torch.arange(10.0).view(2, 5))
        packed = chunk.pack()
        moved = torch.zeros(packed.numel() + offset, dtype=torch.uint8)[offset:]
        moved.copy_(packed)
        assert same(RowsChunk.unpack(moved, max_elements=10).rows, chunk.rows)

    @SETTINGS
    @given(chunks, st.integers(0, 7), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9) | st.just(2**62))
    def test_a_field_of_the_trailer_that_lies(self, chunk: RowsChunk, place: int, value: int) -> None:
        packed = with_field(chunk.pack(), place, value)
        try:
            back = RowsChunk.unpack(packed, max_elements=1000)
        except PayloadError as error:
            assert str(error).endswith(".")
            return
        assert back.rows.numel() * back.rows.element_size() <= packed.numel() - TRAILER_BYTES

    @pytest.mark.parametrize(
        ("place", "value", "words"),
        [
            (0, 0, "mark"),
            (1, 6, "dtype code 6"),
            (1, -1, "dtype code -1"),
            (2, -1, "start at -1"),
            (2, 2**62, "start at"),
            (3, -1, "negative"),
            (3, 2**62, "above"),
            (3, 3, "has 12 bytes|trailer says"),
            (4, 2**39, "elements"),
            (4, 5, "trailer says"),
            (5, -2, "-2 positions"),
            (5, 2**62, "above"),
            (5, 1, "trailer says"),
            (6, -2, "-2 hashes"),
            (6, 2**62, "above"),
            (6, 2, "trailer says"),
            (7, 0, "have 0 positions"),
            (7, 2**62, "positions, but"),
        ],
    )
    def test_each_field_is_checked_by_name(self, place: int, value: int, words: str) -> None:
        prefix = PrefixHashes(16, hashes(1))
        packed = RowsChunk(0, torch.ones(2, 4), torch.ones(3, 2, dtype=torch.int64), prefix=prefix).pack()
        with pytest.raises(PayloadError, match=words):
            RowsChunk.unpack(with_field(packed, place, value), max_elements=100)

    def test_the_limit_holds_for_rows_positions_and_hashes_together(self) -> None:
        prefix = PrefixHashes(16, hashes(1))
        packed = RowsChunk(0, torch.ones(2, 4), torch.ones(3, 2, dtype=torch.int64), prefix=prefix).pack()
        assert RowsChunk.unpack(packed, max_elements=14 + HASH_BYTES).end == 2
        with pytest.raises(PayloadError, match="46 elements"):
            RowsChunk.unpack(packed, max_elements=13 + HASH_BYTES)

    @SETTINGS
    @given(chunks, st.data())
    def test_a_truncated_chunk_is_refused(self, chunk: RowsChunk, data: st.DataObject) -> None:
        packed = chunk.pack()
        kept = data.draw(st.integers(0, packed.numel() - 1))
        from_start = data.draw(st.booleans())
        with pytest.raises(PayloadError):
            RowsChunk.unpack(packed[:kept] if from_start else packed[packed.numel() - kept :], max_elements=1000)

    @SETTINGS
    @given(chunks, st.data())
    def test_a_flipped_bit_of_the_trailer_brings_no_other_error(self, chunk: RowsChunk, data: st.DataObject) -> None:
        packed = chunk.pack()
        bit = data.draw(st.integers(0, TRAILER_BYTES * 8 - 1))
        packed[packed.numel() - TRAILER_BYTES + bit // 8] ^= 1 << (bit % 8)
        try:
            RowsChunk.unpack(packed, max_elements=1000)
        except PayloadError:
            return
        assert bit // 64 != 0, "a mark with a flipped bit was accepted"

    @pytest.mark.parametrize(
        "packed",
        [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8, device="meta")],
    )
    def test_only_flat_bytes_on_the_cpu_are_unpacked(self, packed: torch.Tensor) -> None:
        with pytest.raises(PayloadError, match="uint8 on the CPU"):
            RowsChunk.unpack(packed, max_elements=1000)

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
    def test_a_chunk_of_another_form_cannot_be_made(
        self, start: int, rows: torch.Tensor, positions: torch.Tensor | None, words: str
    ) -> None:
        with pytest.raises(PayloadError, match=words):
            RowsChunk(start, rows, positions)

    @pytest.mark.parametrize(
        ("block_size", "hashes", "words"),
        [(0, (), "have 0 positions"), (16, (b"short",), "32 bytes"), (16, (bytes(33),), "32 bytes")],
    )
    def test_hashes_of_another_form_do_not_travel(self, block_size: int, hashes: tuple[bytes, ...], words: str) -> None:
        with pytest.raises(PayloadError, match=words):
            RowsChunk(0, torch.ones(1, 1), prefix=PrefixHashes(block_size, hashes))

    @SETTINGS
    @given(chunks, st.integers(0, 1010))
    def test_after_keeps_exactly_the_rows_from_the_position_on(self, chunk: RowsChunk, position: int) -> None:
        rest = chunk.after(position)
        kept = [row for row in range(chunk.start, chunk.end) if row >= position]
        if rest is None:
            assert kept == []
            return
        assert list(range(rest.start, rest.end)) == kept
        assert same(rest.rows, chunk.rows[max(position - chunk.start, 0) :])

    def test_a_chunk_that_comes_twice_is_dropped(self) -> None:
        chunk = RowsChunk(4, torch.ones(3, 2))
        assert chunk.after(chunk.end) is None
        assert chunk.after(chunk.start) is chunk

    def test_positions_stay_only_with_the_first_rows(self) -> None:
        chunk = RowsChunk(0, torch.ones(3, 2), torch.ones(3, 3, dtype=torch.int64))
        untouched, rest = chunk.after(0), chunk.after(1)
        assert untouched is not None and untouched.positions is not None
        assert rest is not None and rest.positions is None

    @SETTINGS
    @given(chunks, st.lists(st.integers(0, 7), max_size=3))
    def test_a_chunk_cut_anywhere_joins_to_itself(self, chunk: RowsChunk, cuts: list[int]) -> None:
        count = chunk.rows.shape[0]
        edges = [0, *sorted(min(cut, count) for cut in cuts), count]
        parts = [
            RowsChunk(
                chunk.start + low,
                chunk.rows[low:high],
                chunk.positions if index == 0 else None,
                prefix=chunk.prefix if index == 0 else None,
            )
            for index, (low, high) in enumerate(pairwise(edges))
        ]
        joined = RowsChunk.joined(parts)
        assert joined.start == chunk.start
        assert same(joined.rows, chunk.rows)
        assert joined.positions is chunk.positions and joined.prefix == chunk.prefix

    @pytest.mark.parametrize(
        ("chunks", "words"),
        [
            ([], "no chunks"),
            ([RowsChunk(0, torch.ones(2, 1)), RowsChunk(3, torch.ones(1, 1))], "a gap .* end at 2 .* start at 3"),
            ([RowsChunk(0, torch.ones(2, 1)), RowsChunk(1, torch.ones(1, 1))], "an overlap .* end at 2 .* start at 1"),
            ([RowsChunk(0, torch.ones(2, 1)), RowsChunk(2, torch.ones(1, 2))], "cannot follow"),
            ([RowsChunk(0, torch.ones(2, 1)), RowsChunk(2, torch.ones(1, 1).half())], "cannot follow"),
            (
                [RowsChunk(0, torch.ones(2, 1)), RowsChunk(2, torch.ones(1, 1), torch.ones(3, 1, dtype=torch.int64))],
                "chunk at 2 brings positions",
            ),
            (
                [RowsChunk(0, torch.ones(2, 1)), RowsChunk(2, torch.ones(1, 1), prefix=PrefixHashes(16, ()))],
                "chunk at 2 brings a prompt's hashes",
            ),
        ],
    )
    def test_chunks_that_do_not_follow_are_refused(self, chunks: list[RowsChunk], words: str) -> None:
        with pytest.raises(PayloadError, match=words):
            RowsChunk.joined(chunks)


@SETTINGS
@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), dtypes, st.booleans())
def test_packed_rows_go_out_behind_those_before_them(
    before: int, length: int, width: int, dtype: torch.dtype, is_first: bool
) -> None:
    rows = tensor_of((before + length, width), dtype)
    positions = tensor_of((3, before + length), torch.int64, 1) if is_first else None
    prefix = PrefixHashes(2, hashes(2)) if is_first else None
    whole = PackedRows.of(RowsChunk(4, rows).pack())
    rest = PackedRows.of(RowsChunk(4 + before, rows[before:], positions, prefix=prefix).pack())
    assert (rest.start, rest.end) == (4 + before, whole.end)
    joined = rest.after([whole.raw[:1] if before else whole.raw[:0], whole.raw[1:before]])
    assert same(joined, RowsChunk(4, rows, positions, prefix=prefix).pack())


def test_of_a_prompt_s_blocks_those_before_a_position_are_named() -> None:
    prefix = PrefixHashes(4, hashes(3))
    assert [prefix.blocks_in(position) for position in (0, 3, 4, 11, 12, 100)] == [0, 0, 1, 2, 3, 3]
    assert prefix.up_to(9) == PrefixHashes(4, hashes(2))
