from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_cluster.types.rows import PrefixHashes, Rows
from omni_cluster.vllm_engine.worker.step_rows import (
    NO_FACTS,
    AsyncRowsOutput,
    EmittedPart,
    OmniModelRunnerOutput,
    PinnedBuffers,
    PromptFacts,
    RowsOfStep,
    TokenSpan,
)
from tests.rows import KIND, rows_of

POSITIONS = torch.arange(9).view(3, 3)


def step_of(spans: list[TokenSpan], emitting: set[str]) -> RowsOfStep:
    count = sum(span.length for span in spans)
    rows = torch.arange(count, dtype=torch.float32)[:, None].repeat(1, 4)
    return RowsOfStep.of(KIND, rows, spans, dict.fromkeys(emitting, PromptFacts(POSITIONS)))


def runner_output(*request_ids: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(request_ids),
        req_id_to_index={r: i for i, r in enumerate(request_ids)},
        sampled_token_ids=[[i] for i in range(len(request_ids))],
    )


def unpacked(output: ModelRunnerOutput, index: int) -> Rows:
    assert output.pooler_output is not None
    packed = output.pooler_output[index]
    assert packed is not None
    return Rows.unpack(packed.numpy(), max_elements=100_000)


def test_each_request_that_wants_rows_gets_those_of_its_span() -> None:
    step = step_of([TokenSpan("a", 0, 3), TokenSpan("mute", 7, 2), TokenSpan("b", 5, 1)], {"a", "b"})
    chunks = step.by_request(step.rows, step.finite)
    assert chunks.keys() == {"a", "b"}
    assert chunks["a"].start == 0 and chunks["a"].tensor()[:, 0].tolist() == [0, 1, 2]
    assert chunks["b"].start == 5 and chunks["b"].tensor()[:, 0].tolist() == [5]


def test_requests_that_want_rows_but_are_not_in_the_step_get_none() -> None:
    step = step_of([TokenSpan("a", 0, 1)], {"a", "elsewhere"})
    assert step.by_request(step.rows, step.finite).keys() == {"a"}


def test_of_a_step_go_out_the_rows_that_the_masks_of_prompts_have() -> None:
    spans = [TokenSpan("mute", 0, 2), TokenSpan("a", 3, 4), TokenSpan("decodes", 9, 1), TokenSpan("b", 0, 3)]
    of_a = np.array([True, False, True, False, True])
    prompts = {"a": of_a, "decodes": np.ones(9, np.bool_), "b": np.zeros(5, np.bool_), "elsewhere": of_a}
    part = EmittedPart.of(spans, prompts)
    assert part.spans == [TokenSpan("a", 3, 2), TokenSpan("b", 0, 3)]
    assert part.places.tolist() == [3]  # two of the mute one come before, and one of its own that has no row
    step = RowsOfStep.of(KIND, torch.arange(10.0)[part.places, None], part.spans, {"a": NO_FACTS, "b": NO_FACTS})
    step = replace(step, masks=part.masks)
    made = step.by_request(step.rows, step.finite)
    assert made["a"] is not None and (made["a"].start, made["a"].end, made["a"].at.tolist()) == (3, 5, [4])
    assert made["a"].tensor().tolist() == [[3.0]]
    assert made["b"] is not None and (made["b"].start, made["b"].end, made["b"].tensor().shape) == (0, 3, (0, 1))


def test_a_part_with_all_of_its_rows_has_no_mask() -> None:
    part = EmittedPart.of([TokenSpan("a", 1, 3)], {"a": np.array([False, True, True, True, False])})
    step = RowsOfStep.of(KIND, torch.ones(3, 4), part.spans, {"a": PromptFacts(POSITIONS)}, part.masks)
    chunk = unpacked(step.attach_to(runner_output("a")), 0)
    assert (chunk.start, chunk.end, chunk.mask) == (1, 4, None) and chunk.positions is not None


def test_a_step_of_which_no_row_goes_out_is_none() -> None:
    part = EmittedPart.of([TokenSpan("a", 4, 1)], {"a": np.ones(4, np.bool_)})
    assert (list(part.spans), part.places.tolist()) == ([], [])


def test_a_row_that_is_not_finite_takes_its_requests_rows_out_and_is_told() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        rows = torch.zeros(4, 4)
        rows[1, 2] = value
        spans = [TokenSpan("a", 0, 2), TokenSpan("b", 5, 1), TokenSpan("mute", 0, 1)]
        step = RowsOfStep.of(KIND, rows, spans, {"a": NO_FACTS, "b": NO_FACTS})
        output = step.attach_to(replace(runner_output("a", "b", "mute"), num_nans_in_logits={"mute": 1, "a": 0}))
        assert output.pooler_output is not None and output.pooler_output[0] is None
        assert unpacked(output, 1).start == 5
        assert output.num_nans_in_logits == {"mute": 1, "a": 1}


def test_what_is_known_of_a_prompt_comes_with_the_rows_that_it_is_given_for() -> None:
    rows, prefix = torch.zeros(3, 4), PrefixHashes(2, (bytes(32),))
    facts = {"first": PromptFacts(POSITIONS, prefix), "later": NO_FACTS}
    spans = [TokenSpan("first", 2, 2), TokenSpan("later", 2, 1)]
    step = RowsOfStep.of(KIND, rows, spans, facts)
    first, later = (step.by_request(rows, step.finite)[name] for name in ("first", "later"))
    assert np.array_equal(first.positions, POSITIONS.numpy()) and first.prefix == prefix
    assert later.positions is None and later.prefix is None


def test_packed_rows_survive_the_way_through_the_output() -> None:
    step = step_of([TokenSpan("mute", 0, 1), TokenSpan("a", 0, 3)], {"a"})
    output = step.attach_to(runner_output("mute", "a"))
    assert output.pooler_output is not None and output.pooler_output[0] is None
    chunk = unpacked(output, 1)
    assert chunk.start == 0 and torch.equal(chunk.tensor(), step.rows[1:4])
    assert np.array_equal(chunk.positions, POSITIONS.numpy())


def test_chunks_are_found_by_request_and_not_by_place() -> None:
    step = step_of([TokenSpan("a", 0, 1), TokenSpan("b", 0, 1)], {"a", "b"})
    output = step.attach_to(runner_output("b", "a"))
    assert unpacked(output, 0).tensor()[0, 0] == 1
    assert unpacked(output, 1).tensor()[0, 0] == 0


def test_what_vllm_said_of_the_step_stays() -> None:
    plain = runner_output("a", "b")
    output = OmniModelRunnerOutput.with_rows(plain, {"b": rows_of(0, torch.ones(1, 4))})
    assert isinstance(output, ModelRunnerOutput)
    assert output.req_ids == ["a", "b"] and output.sampled_token_ids == [[0], [1]]
    assert output.req_id_to_index == plain.req_id_to_index


def test_bfloat16_rows_keep_their_type() -> None:
    rows = torch.tensor([[0.1, -2.0]], dtype=torch.bfloat16)
    step = RowsOfStep.of(KIND, rows, [TokenSpan("a", 4, 1)], {"a": NO_FACTS})
    chunk = unpacked(step.attach_to(runner_output("a")), 0)
    assert chunk.dtype == "bfloat16" and torch.equal(chunk.tensor(), rows)


@pytest.mark.gpu
def test_pinned_buffer_is_used_again_once_it_is_given_back() -> None:
    buffers = PinnedBuffers()
    first = buffers.take(1000)
    assert first.is_pinned() and first.numel() >= 1000
    second = buffers.take(1000)
    assert second.data_ptr() != first.data_ptr()
    buffers.give_back(first)
    assert buffers.take(500).data_ptr() == first.data_ptr()


@pytest.mark.gpu
def test_pinned_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    buffers = PinnedBuffers()
    buffers.give_back(buffers.take(16))
    assert buffers.take(1 << 16).numel() >= 1 << 16


class _Inner(AsyncModelRunnerOutput):  # type: ignore[misc]
    def get_output(self) -> ModelRunnerOutput:
        return runner_output("a")


@pytest.mark.gpu
def test_rows_that_travel_on_a_side_stream_arrive_whole() -> None:
    buffers, stream = PinnedBuffers(), torch.cuda.Stream()
    for number in range(3):
        rows = torch.full((64, 128), float(number), device="cuda")
        step = RowsOfStep.of(KIND, rows, [TokenSpan("a", 0, 64)], {"a": PromptFacts(POSITIONS)})
        output = AsyncRowsOutput(_Inner(), step, stream, buffers).get_output()
        assert torch.equal(unpacked(output, 0).tensor(), rows.cpu())
    assert buffers.take(rows.nbytes).numel() >= rows.nbytes


@pytest.mark.gpu
def test_two_steps_in_flight_have_buffers_of_their_own() -> None:
    buffers, stream = PinnedBuffers(), torch.cuda.Stream()
    made = []
    for number in range(2):
        rows = torch.full((8, 128), float(number), device="cuda")
        step = RowsOfStep.of(KIND, rows, [TokenSpan("a", 0, 8)], {"a": NO_FACTS})
        made.append(AsyncRowsOutput(_Inner(), step, stream, buffers))
    assert [unpacked(output.get_output(), 0).tensor()[0, 0].item() for output in made] == [0, 1]
