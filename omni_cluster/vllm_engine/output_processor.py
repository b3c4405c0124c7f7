"""vLLM's output processor, with conditioning rows taken off the engine's outputs before it sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from vllm.logprobs import Logprob
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.engine.output_processor import RequestState as StockRequestState

from omni_cluster.models.family import StreamInterval
from omni_cluster.types.errors import PayloadError
from omni_cluster.types.rows import LARGE_BYTES, Rows

T = TypeVar("T")


class RowsSink:
    """The rows of one request that its reader has not taken yet, without gap and without repetition.

    A preempted request computes its positions again; what comes a second time is dropped.
    `admitted`: set once the request is on its way to the engine, behind which later rows may follow.
    `prefill_stats`: vLLM's, of a partial prefill, until an output that vLLM sees takes them along.
    `known`: output tokens that another engine made, and that were delivered; `known_text`: their delivered text.
    `start`: where the rows begin.
    """

    def __init__(
        self, stream_interval: StreamInterval | None = None, known: Sequence[int] = (), start: int = 0
    ) -> None:
        self.stream_interval = stream_interval
        self.known = known
        self.known_text = ""
        self.prefill_stats: Any = None
        self.admitted = asyncio.Event()
        self._filled = asyncio.Event()
        self._error: PayloadError | None = None
        self._chunks: list[Rows] = []
        self._taken = start
        self._end = start

    def put(self, chunk: Rows) -> None:
        """Never raises: it runs in the loop that serves all requests of the engine, as `fail` does."""
        new = chunk.after(self._end)
        if new is not None:
            self._chunks.append(new if self._end == 0 else new.without_facts())
            self._end = new.end

    def fail(self, error: PayloadError) -> None:
        """The reader gets this error in place of any further rows."""
        self._error = error

    def tell(self) -> None:
        """What came last comes with no output of vLLM's, which would wake the reader."""
        self._filled.set()

    async def before_first(self, outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T | None, None]:
        """The outputs; before the first, None each time that rows have come of a part of the prompt, without output."""
        async with contextlib.aclosing(outputs):
            first = asyncio.ensure_future(anext(outputs))
            try:
                while not await self._come_before(first):
                    yield None
                yield await first
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            async for output in outputs:
                yield output

    async def _come_before(self, first: asyncio.Future[T]) -> bool:
        """Waits for rows or for the first output. Returns whether the output is there, with which rows come too."""
        filled = asyncio.ensure_future(self._filled.wait())
        try:
            either: tuple[asyncio.Future[Any], ...] = (first, filled)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            filled.cancel()
        return first.done()

    def take_large(self) -> Rows | None:
        """The first chunk, if it is a large one and others wait behind it; else None. PayloadError as `take`."""
        if self._error is not None or len(self._chunks) < 2 or self._chunks[0].raw.nbytes < LARGE_BYTES:
            return None
        return self._joined(1)

    def take(self) -> Rows | None:
        """All rows since the last call; PayloadError when the engine left rows out, or sent some that are none."""
        self._filled.clear()
        if self._error is not None:
            raise self._error
        return self._joined(len(self._chunks)) if self._chunks else None

    def _joined(self, count: int) -> Rows:
        chunks, self._chunks = self._chunks[:count], self._chunks[count:]
        if chunks[0].start != self._taken and not (self._taken == 0 and _leaves_blocks_out(chunks[0])):
            raise PayloadError(
                f"gap between hidden states that end at {self._taken} and those that start at {chunks[0].start}."
            )
        joined = Rows.joined(chunks)
        self._taken = joined.end
        return joined


def _leaves_blocks_out(first: Rows) -> bool:
    """Whether what is missing before a request's first rows are whole blocks of its prompt."""
    prefix = first.prefix
    return prefix is not None and prefix.blocks_in(first.start) * prefix.block_size == first.start


class OmniOutputProcessor(OutputProcessor):
    """Puts each request's rows into its sink.

    vLLM takes an output that has a tensor for a pooling result, and merges outputs that a slow reader leaves
    waiting; so rows go beside them. A prefill chunk that made rows but no token yet is no output for vLLM.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_row_elements = 0
        self._sinks: dict[str, RowsSink] = {}

    def open_sink(
        self,
        external_id: str,
        stream_interval: StreamInterval | None = None,
        known: Sequence[int] = (),
        start: int = 0,
    ) -> RowsSink:
        sink = self._sinks[external_id] = RowsSink(stream_interval, known, start)
        return sink

    def close_sink(self, external_id: str) -> None:
        self._sinks.pop(external_id, None)

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        sink = self._sinks.get(request.external_req_id or request.request_id)
        if sink is not None:
            sink.known_text = go_on_behind(sink.known, self.request_states[request.request_id])
            sink.admitted.set()  # vLLM sends it now, before any other task runs

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        passed = [output for output in engine_core_outputs if self._take_rows(output)]
        for output in passed:
            self._keep_interval(output)
        return super().process_outputs(passed, *args, **kwargs)

    def _keep_interval(self, output: EngineCoreOutput) -> None:
        """vLLM's own interval starts after the first token and never changes; ours changes, see `StreamInterval`."""
        state, sink = self.request_states.get(output.request_id), self._sink_of(output)
        if state is None or sink is None or sink.stream_interval is None or state.detokenizer is None:
            return
        made = state.detokenizer.num_output_tokens() + len(output.new_token_ids)
        state.stream_interval = sink.stream_interval.after(state.sent_tokens_offset)
        if state.stream_interval == 1:
            state.sent_tokens_offset = made  # vLLM counts what was sent only with a longer interval

    def _take_rows(self, output: EngineCoreOutput) -> bool:
        """Moves the output's rows to the sink. Returns whether anything is left for vLLM."""
        packed, output.pooling_output = output.pooling_output, None
        if packed is None:
            return True
        sink = self._sink_of(output)
        if sink is not None:
            self._put(packed, sink)
        is_whole = self._hand_on_prefill_stats(output, sink)
        if sink is not None and not is_whole:
            sink.tell()
        return is_whole

    def _put(self, packed: Any, sink: RowsSink) -> None:
        """Rows that cannot be read end their own request, and not the loop that serves all."""
        try:
            sink.put(Rows.unpack(packed.numpy(), max_elements=self.max_row_elements))
        except PayloadError as error:
            sink.fail(error)

    def _sink_of(self, output: EngineCoreOutput) -> RowsSink | None:
        state = self.request_states.get(output.request_id)
        return self._sinks.get(state.external_req_id) if state is not None else None

    @staticmethod
    def _hand_on_prefill_stats(output: EngineCoreOutput, sink: RowsSink | None) -> bool:
        """A partial prefill's statistics ride the first output that vLLM sees; until then the sink has them."""
        if not output.new_token_ids and output.finish_reason is None:
            if sink is not None and output.prefill_stats is not None:
                sink.prefill_stats = output.prefill_stats
            return False
        if sink is not None and output.prefill_stats is None:
            output.prefill_stats, sink.prefill_stats = sink.prefill_stats, None
        return True


def go_on_behind(known: Sequence[int], state: StockRequestState) -> str:
    """Brings a request that has just come to where one is that has said `known`: what follows is text behind theirs.

    Returns the text that one has said.
    """
    detokenizer, logprobs = state.detokenizer, state.logprobs_processor
    if not known or detokenizer is None:
        return ""
    detokenizer.update(list(known), stop_terminated=False)
    said: str = detokenizer.get_next_output_text(finished=False, delta=True)
    state.sent_tokens_offset = len(known)
    if logprobs is not None and logprobs.logprobs is not None:
        # Of a token that ends a character, vLLM reads here which ones began it.
        logprobs.logprobs += [{token: Logprob(0.0)} for token in known]
    return said
