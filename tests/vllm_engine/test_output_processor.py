from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from omni_cluster.models.family import StreamInterval
from omni_cluster.types.errors import PayloadError
from omni_cluster.types.rows import LARGE_BYTES, PrefixHashes, Rows
from omni_cluster.vllm_engine.output_processor import OmniOutputProcessor, RowsSink
from tests.rows import rows_of


def chunk(start: int, end: int, positions: torch.Tensor | None = None) -> Rows:
    """Rows whose every element is their position."""
    return rows_of(start, torch.arange(start, end, dtype=torch.float32)[:, None].repeat(1, 2), positions)


def packed(start: int, end: int) -> torch.Tensor:
    return torch.from_numpy(chunk(start, end).pack())


def taken(sink: RowsSink) -> list[float]:
    rows = sink.take()
    assert rows is not None
    assert rows.start == rows.tensor()[0, 0]
    return rows.tensor()[:, 0].tolist()


def test_take_gives_all_rows_since_the_last_time_as_one() -> None:
    sink = RowsSink()
    assert sink.take() is None
    sink.put(chunk(0, 2))
    sink.put(chunk(2, 3))
    assert taken(sink) == [0, 1, 2]
    assert sink.take() is None
    sink.put(chunk(3, 5))
    assert taken(sink) == [3, 4]


def large(start: int) -> Rows:
    """One row of `LARGE_BYTES`."""
    return rows_of(start, torch.full((1, LARGE_BYTES // 4), float(start)))


def test_a_large_chunk_with_others_behind_it_is_taken_alone() -> None:
    sink = RowsSink()
    sink.put(large(0))
    assert sink.take_large() is None
    for start in (1, 2):
        sink.put(large(start))
    assert [rows.start for _ in range(2) if (rows := sink.take_large()) is not None] == [0, 1]
    assert sink.take_large() is None
    rest = sink.take()
    assert rest is not None and (rest.start, rest.end) == (2, 3)
    assert sink.take() is None


def test_small_chunks_are_not_taken_alone_and_a_large_one_only_in_its_turn() -> None:
    sink = RowsSink()
    sink.put(chunk(0, 2))
    sink.put(chunk(2, 3))
    assert sink.take_large() is None
    sink = RowsSink()
    sink.put(large(1))
    sink.put(large(2))
    with pytest.raises(PayloadError, match="gap"):
        sink.take_large()


def test_a_fault_is_told_before_any_rows() -> None:
    sink = RowsSink()
    sink.put(large(0))
    sink.put(large(1))
    sink.fail(PayloadError("broken"))
    assert sink.take_large() is None
    with pytest.raises(PayloadError, match="broken"):
        sink.take()


def test_rows_that_come_again_are_dropped() -> None:
    sink = RowsSink()
    sink.put(chunk(0, 4))
    assert taken(sink) == [0, 1, 2, 3]
    sink.put(chunk(0, 2))
    sink.put(chunk(2, 4))
    assert sink.take() is None


def test_of_a_chunk_that_partly_repeats_the_new_rows_are_kept() -> None:
    sink = RowsSink()
    sink.put(chunk(0, 2))
    sink.put(chunk(0, 5))
    sink.put(chunk(4, 6))
    assert taken(sink) == [0, 1, 2, 3, 4, 5]


def test_positions_come_once_though_the_first_chunk_comes_twice() -> None:
    positions = torch.zeros(3, 2, dtype=torch.int64)
    sink = RowsSink()
    sink.put(chunk(0, 2, positions))
    first = sink.take()
    sink.put(chunk(0, 3, positions))
    second = sink.take()
    assert first is not None and np.array_equal(first.positions, positions.numpy())
    assert second is not None and second.positions is None and second.start == 2


def test_a_gap_is_refused() -> None:
    sink = RowsSink()
    sink.put(chunk(0, 2))
    with pytest.raises(PayloadError, match="gap between hidden states that end at 2 and those that start at 3"):
        sink.put(chunk(3, 4))
        sink.take()


def test_a_gap_after_rows_that_were_taken_is_refused() -> None:
    sink = RowsSink()
    sink.put(chunk(0, 2))
    sink.take()
    with pytest.raises(PayloadError, match="gap"):
        sink.put(chunk(3, 4))
        sink.take()


def left_out(start: int, end: int) -> Rows:
    """The first rows of a prompt of blocks of two positions each."""
    prefix = PrefixHashes(2, tuple(bytes([i]) * 32 for i in range(3)))
    return rows_of(start, torch.zeros(end - start, 1), torch.zeros(3, 7, dtype=torch.int64), prefix=prefix)


def test_first_rows_may_leave_out_whole_blocks_of_the_prompt() -> None:
    sink = RowsSink()
    sink.put(left_out(4, 7))
    rows = sink.take()
    assert rows is not None and (rows.start, rows.end) == (4, 7) and rows.prefix is not None
    sink.put(rows_of(8, torch.zeros(1, 1)))
    with pytest.raises(PayloadError, match="end at 7 and those that start at 8"):
        sink.take()


@pytest.mark.parametrize("start", [1, 3, 8])
def test_first_rows_that_leave_out_anything_else_are_refused(start: int) -> None:
    sink = RowsSink()
    sink.put(left_out(start, 9))
    with pytest.raises(PayloadError, match="gap"):
        sink.take()


def test_what_a_preempted_request_leaves_out_was_told_before() -> None:
    sink = RowsSink()
    sink.put(left_out(4, 6))
    sink.put(left_out(6, 8))
    sink.put(left_out(4, 9))
    rows = sink.take()
    assert rows is not None and (rows.start, rows.end) == (4, 9)


def test_first_rows_must_be_those_of_position_zero() -> None:
    sink = RowsSink()
    with pytest.raises(PayloadError, match="gap"):
        sink.put(chunk(1, 2))
        sink.take()


@pytest.mark.parametrize(("handed_on", "interval"), [(0, 1), (23, 1), (24, 12), (36, 12), (143, 12), (144, 48)])
def test_the_stream_interval_is_at_once_until_what_is_needed_first_was_handed_on(handed_on: int, interval: int) -> None:
    assert StreamInterval(24, 12, late=48, late_from=144).after(handed_on) == interval


# ------------------------------------------------------------- among vLLM's outputs

BROKEN = torch.zeros(128, dtype=torch.uint8)
"""Packed rows without the mark at their end."""


@pytest.fixture
def processor() -> OmniOutputProcessor:
    made = OmniOutputProcessor(None, log_stats=False)
    made.max_row_elements = 100
    return made


def begun(processor: OmniOutputProcessor, name: str) -> tuple[RowsSink, RequestOutputCollector]:
    """A request, whose internal id is its name and a number, and where its rows and its outputs go."""
    sink = processor.open_sink(name)
    params = SamplingParams(max_tokens=4, detokenize=False, output_kind=RequestOutputKind.DELTA)
    asked = EngineCoreRequest(f"{name}-1", [1, 2, 3], None, params, None, 0.0, None, None, None, external_req_id=name)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, f"{name}-1")
    processor.add_request(asked, None, queue=queue)
    return sink, queue


def test_rows_that_cannot_be_read_end_their_own_request_and_no_other(processor: OmniOutputProcessor) -> None:
    sinks = {name: begun(processor, name) for name in ("broken", "sound")}
    outputs = [
        EngineCoreOutput("broken-1", [7], pooling_output=BROKEN.clone()),
        EngineCoreOutput("sound-1", [8], pooling_output=packed(0, 3)),
    ]
    processor.process_outputs(outputs)  # in vLLM's loop for all requests: it must not raise
    assert taken(sinks["sound"][0]) == [0, 1, 2]
    with pytest.raises(PayloadError, match="do not begin with the mark"):
        sinks["broken"][0].take()
    for name, token in (("broken", 7), ("sound", 8)):
        made = sinks[name][1].output
        assert made is not None and made.outputs[0].token_ids == [token]


@pytest.mark.parametrize("ends", ["aborted", "finished"])
def test_a_partial_prefills_statistics_are_not_kept_longer_than_their_request(
    processor: OmniOutputProcessor, ends: str
) -> None:
    begun(processor, "long")
    stats = PrefillStats()
    kept = weakref.ref(stats)
    processor.process_outputs([EngineCoreOutput("long-1", [], pooling_output=packed(0, 2), prefill_stats=stats)])
    del stats
    if ends == "finished":
        last = EngineCoreOutput("long-1", [7], pooling_output=packed(2, 3))
        processor.process_outputs([last])
        assert last.prefill_stats is kept() is not None
        del last
    processor.abort_requests(["long"], internal=False)
    processor.close_sink("long")
    gc.collect()
    assert kept() is None


# ---------------------------------------------- a request that is begun again

SPELLED = "Grüße, 世界 😀! Ein Ende, und noch eins."
"""The tiny checkpoint's tokens are bytes: its characters have up to four."""
SAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "held back": {"stop": ["never said", "Ende, ab"]},
    "stops": {"stop": ["界 😀!"]},
    "stops, said": {"stop": ["界 😀!"], "include_stop_str_in_output": True},
    "stops later": {"stop": ["n"], "min_tokens": 38},
}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def said_of(tokenizer: Any, tokens: Sequence[int], known: Sequence[int], **says: Any) -> list[CompletionOutput]:
    """What vLLM says, token by token, of those that follow `known`, with a logprob for each."""
    processor = OmniOutputProcessor(tokenizer, log_stats=False)
    processor.open_sink("r", None, known)
    params = SamplingParams(max_tokens=99, logprobs=0, output_kind=RequestOutputKind.DELTA, **says)
    asked = EngineCoreRequest("r-1", [1, 2, 3], None, params, None, 0.0, None, None, None, external_req_id="r")
    queue, made = RequestOutputCollector(RequestOutputKind.DELTA, "r-1"), []
    processor.add_request(asked, None, queue=queue)
    for token in tokens[len(known) :]:
        logprobs = LogprobsLists(np.array([[token]]), np.array([[-1.0]]), np.array([1]))
        processor.process_outputs([EngineCoreOutput("r-1", [token], new_logprobs=logprobs)])
        output = queue.get_nowait()
        assert isinstance(output, RequestOutput)
        made += output.outputs
        if output.finished:
            break
    return made


@pytest.mark.parametrize("name", SAYS)
def test_text_goes_on_behind_every_token(tokenizer: Any, name: str) -> None:
    """Within a character, within a stop string, and within what is held back for one."""
    tokens, says = tokenizer.encode(SPELLED), SAYS[name]
    whole = said_of(tokenizer, tokens, (), **says)
    assert (whole[-1].finish_reason == "stop") == name.startswith("stops")
    for cut in range(1, len(whole)):
        rest = said_of(tokenizer, tokens, tokens[:cut], **says)
        assert [(one.text, one.finish_reason) for one in rest] == [(o.text, o.finish_reason) for o in whole[cut:]]
        assert [spelled(one) for one in rest] == [spelled(one) for one in whole[cut:]]


def spelled(said: CompletionOutput) -> list[str | None]:
    """The tokens as their logprobs spell them: the last one of a character is the character."""
    assert said.logprobs is not None and len(said.logprobs) == 1
    return [logprob.decoded_token for logprob in said.logprobs[0].values()]


class Outputs:
    """Outputs of a request that the test gives, and whether they were closed."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[str | None] = asyncio.Queue()
        self.closed = False

    async def read(self) -> AsyncGenerator[str, None]:
        try:
            while (output := await self.given.get()) is not None:
                yield output
        finally:
            self.closed = True


async def test_rows_of_parts_are_told_before_the_first_output_and_never_after_it() -> None:
    sink, outputs = RowsSink(), Outputs()
    told = sink.before_first(outputs.read())
    for start in (0, 2):
        sink.put(chunk(start, start + 2))
        sink.tell()
        assert await anext(told) is None
        assert taken(sink) == [start, start + 1]
    sink.put(chunk(4, 6))  # with the output, which alone says so
    for output in ("first", "second", None):
        outputs.given.put_nowait(output)
    assert [output async for output in told] == ["first", "second"]
    assert taken(sink) == [4, 5] and outputs.closed


async def test_a_part_that_cannot_be_read_is_told_too() -> None:
    sink, outputs = RowsSink(), Outputs()
    told = sink.before_first(outputs.read())
    sink.fail(PayloadError("not rows"))
    sink.tell()
    assert await anext(told) is None
    with pytest.raises(PayloadError, match="not rows"):
        sink.take()
    await told.aclose()
    assert outputs.closed


async def test_leaving_before_the_first_output_closes_the_outputs() -> None:
    sink, outputs = RowsSink(), Outputs()
    told = sink.before_first(outputs.read())
    waiting = asyncio.ensure_future(anext(told))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await told.aclose()
    assert outputs.closed
