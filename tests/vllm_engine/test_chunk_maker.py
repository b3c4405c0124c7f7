from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput
from omni_cluster.types.rows import RESIDUAL_CODES, Rows
from omni_cluster.vllm_engine.chunk_maker import CodesMaker
from omni_cluster.vllm_engine.output_processor import RowsSink


def output(token_ids: list[int], finish_reason: str | None = None) -> RequestOutput:
    completion = CompletionOutput(0, "", token_ids, None, None, finish_reason=finish_reason)
    return RequestOutput("r", None, [1], None, [completion], finish_reason is not None)


def put(sink: RowsSink, start: int, *codes: Sequence[int]) -> None:
    sink.put(Rows.of(RESIDUAL_CODES, start, torch.tensor(codes, dtype=torch.int16)))


def maker(sink: RowsSink, known: KnownOutput | None = None) -> CodesMaker:
    return CodesMaker(sink, known or KnownOutput(), None, lambda _: b"")


def test_residual_codes_come_with_their_tokens_though_they_are_there_before() -> None:
    sink = RowsSink()
    chunks = maker(sink)
    put(sink, 0, [10, 20], [11, 21], [12, 22])
    assert chunks.make(output([5])).codes == Codes.of(0, [[5, 10, 20]])
    put(sink, 3, [13, 23])
    made = chunks.make(output([6, 7, 8], "length"))
    assert made.codes == Codes.of(1, [[6, 11, 21], [7, 12, 22], [8, 13, 23]]) and made.rows is None


@pytest.mark.parametrize("tokens", [[5, 9], [9]])
def test_the_token_that_ends_them_has_none(tokens: list[int]) -> None:
    sink = RowsSink()
    put(sink, 0, [10, 20], [11, 21], [12, 22])
    made = maker(sink).make(output(tokens, "stop"))
    assert made.codes == (Codes.of(0, [[5, 10, 20]]) if len(tokens) > 1 else None)


@pytest.mark.parametrize(("reason", "kept"), [("stop", 1), ("length", 1), (None, 2)])
def test_a_family_may_drop_the_code_of_a_request_that_ends_by_its_length(reason: str | None, kept: int) -> None:
    sink = RowsSink()
    put(sink, 0, [10, 20], [11, 21])
    chunks = CodesMaker(sink, KnownOutput(), None, lambda _: b"", codeless_ends=frozenset({"stop", "length"}))
    assert chunks.make(output([5, 6], reason)).codes == Codes.of(0, [[5, 10, 20], [6, 11, 21]][:kept])


def test_known_ones_are_not_made_again() -> None:
    known = KnownOutput(codes=Codes.of(0, [[5, 10, 20], [6, 11, 21]]))
    sink = RowsSink(None, known.inputs, known.made)
    put(sink, 2, [12, 22])
    assert maker(sink, known).make(output([7])).codes == Codes.of(2, [[7, 12, 22]])
