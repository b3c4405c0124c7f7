"""One autoregressive stage on vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from opentelemetry import propagate
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.base import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerFactory

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.family import ARSession, EngineInput, GivenReply
from omni_cluster.models.lora import read_adapters
from omni_cluster.models.progress import Probe, Progress, StallWatch
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.errors import (
    AdapterError,
    GrammarRefused,
    NotFinite,
    OmniError,
    PayloadError,
    PromptTooLong,
    RequestError,
    RequestGone,
    StageDied,
)
from omni_cluster.types.inputs import KnownOutput, OmniRequest, RowsPush, StageExtra
from omni_cluster.types.outputs import StageChunk, answering
from omni_cluster.types.rows import IDS, PrefixHashes, Rows, check_together
from omni_cluster.vllm_engine.chunk_maker import ChunkMaker, CodesMaker, is_aborted, is_only_said, said_chunk
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES
from omni_cluster.vllm_engine.grammar import NO_WAY, GrammarCheck
from omni_cluster.vllm_engine.held_prefixes import PrefixHold
from omni_cluster.vllm_engine.install import replaced
from omni_cluster.vllm_engine.lora import check_features, load
from omni_cluster.vllm_engine.output_processor import OmniOutputProcessor, RowsSink
from omni_cluster.vllm_engine.rows_pusher import PushWindow, Refusals, RowsPusher
from omni_cluster.vllm_engine.sampling_params import StageSampling, refused
from omni_cluster.vllm_engine.scheduler import NOT_FINITE
from omni_cluster.vllm_engine.token_bytes import TokenBytes
from omni_cluster.vllm_engine.tool_calls import CallReader
from omni_cluster.vllm_engine.version_check import check_names

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LENGTHS = ("input_text", "input_tokens")
"""What vLLM's errors name for a prompt that is too long."""
EARLIER_PART_BYTES = 4 << 20
"""Rows that were left out are asked of the engine in parts of this size: it does nothing else while it copies one."""
MOST_SENDINGS = 3
"""Of a request with media, to one engine: beside others with the same ones a second may come too early."""
DEATH_S = 3.0
"""So long after an engine has failed a call it may say that it dies: when a part of it is gone, its calls end first."""


class OmniAsyncLLM(AsyncLLM):
    """AsyncLLM with our output processor, which has no hook: its name is ours while the engine is built."""

    output_processor: OmniOutputProcessor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(async_llm, "OutputProcessor", OmniOutputProcessor), ENGINE_PROCESSES.installed():
            super().__init__(*args, **kwargs)


class StageLLM:
    """An autoregressive `Stage`."""

    def __init__(
        self,
        stage: StageConfig,
        pipeline: PipelineConfig,
        spec: ARSpec,
        model: str,
        stat_loggers: Sequence[StatLoggerFactory] = (),
    ) -> None:
        """`stat_loggers`: what counts of the engine's steps, in place of vLLM's own."""
        self._stage = stage
        self._stat_loggers = list(stat_loggers)
        self._pipeline = pipeline
        self._spec = spec
        self._traits = spec.traits
        check_names(self._traits.relied_on, self._traits.signatures)
        self._adapters = read_adapters(stage, spec.lora_prefixes)
        check_features(stage, self._adapters)
        self._args = OmniEngineArgs.for_ar_stage(stage, pipeline, model, spec, self._adapters)
        self._lora_requests: Mapping[str, LoRARequest] = {}
        self._llm: OmniAsyncLLM | None = None
        self._token_bytes: TokenBytes | None = None
        self._grammars: GrammarCheck | None = None
        self._started_sampling: StageSampling | None = None
        self._pusher = RowsPusher(self._send_rows)
        self._probe = Probe(self._progress, StallWatch(stage.model_stage, stage.stall_timeout_s))

    async def start(self) -> None:
        llm = await asyncio.to_thread(OmniAsyncLLM.from_engine_args, self._args, stat_loggers=self._stat_loggers)
        # Here, and not by the first request: spans of others would be put into that one's trace.
        llm._run_output_handler()
        llm.output_processor.max_row_elements = self._pipeline.limits.max_payload_elements
        _forget_media_in_turn(llm.renderer)
        self._llm = llm
        try:
            self._lora_requests = await load(llm, self._adapters)
        except AdapterError:
            await self.shutdown()
            raise
        self._grammars = GrammarCheck(llm.input_processor)
        self._started_sampling = StageSampling(self._stage, self._pipeline.limits, self._spec, llm.model_config)
        if not self._traits.has_tokenizer:
            # vLLM would count the text's end token among this stage's stops, by an id that means something else here.
            llm.input_processor.generation_config_fields = {}

    @property
    def llm(self) -> OmniAsyncLLM:
        return self._started(self._llm)

    @property
    def _sampling(self) -> StageSampling:
        return self._started(self._started_sampling)

    def _started(self, part: T | None) -> T:
        if part is None:
            raise RuntimeError(f"stage {self._stage.model_stage} is not started; await start() first.")
        return part

    def _bytes_of(self, token_id: int) -> bytes:
        """No bytes for a token that is no text."""
        if not self._traits.has_tokenizer:
            return b""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self.llm.renderer.get_tokenizer())
        return self._token_bytes.of(token_id)

    def check(self, request: OmniRequest) -> None:
        """See `Stage.check`."""
        self._sampling.params(request, {})

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None = None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`. Raises RequestError for what the engine cannot take, StageDied when it has died."""
        hold = PrefixHold(request.request_id, self.llm.engine_core.call_utility_async)
        session = self._spec.session(request, upstream, hold.positions)
        known = session.known
        if known.made:
            yield StageChunk(token_ids=known.token_ids, codes=known.codes)
        async with contextlib.AsyncExitStack() as cleanup:
            await cleanup.enter_async_context(self._death_named())
            cleanup.push_async_callback(hold.let_go)
            engine_input = await session.prompt()
            if engine_input is None:
                yield StageChunk(known.made, finish_reason=known.finish_reason or "stop")
                return
            if is_only_said(engine_input, known):
                rendered = await self._rendered(engine_input.prompt)
                yield said_chunk(known, engine_input.given_reply, rendered["prompt_token_ids"])
                return
            starts = known.made if self._spec.has_residual_codes else 0
            sink = self.llm.output_processor.open_sink(
                request.request_id, engine_input.stream_interval, known.inputs, starts
            )
            hold.is_there = sink.admitted.is_set
            cleanup.callback(self.llm.output_processor.close_sink, request.request_id)
            outputs = await self._start(request, engine_input, sink, known, hold.name)
            cleanup.push_async_callback(outputs.aclose)
            feeder = self._fed(request.request_id, session, sink, cleanup) if engine_input.is_part else None
            chunks = self._chunk_maker(sink, known, engine_input.given_reply, self._call_reader(request))
            async for output in self._refusals_named(outputs):
                if feeder is None and not engine_input.rows_complete:
                    feeder = self._fed(request.request_id, session, sink, cleanup)
                while (rows := chunks.large_rows()) is not None:
                    yield self._answering(rows)
                if is_aborted(output):
                    if feeder is None or await feeder:
                        raise await self._broken_off()
                    yield StageChunk(finish_reason="stop")
                    return
                yield self._answering(chunks.make(output))

    def _answering(self, chunk: StageChunk) -> StageChunk:
        rows = chunk.rows
        if rows is None or rows.prefix is None:
            return chunk
        return answering(chunk, functools.partial(self._earlier_rows, rows, rows.prefix))

    async def _earlier_rows(self, rows: Rows, prefix: PrefixHashes, first: int) -> AsyncGenerator[Rows, None]:
        """What goes before `rows` from `first` on, where blocks begin, in parts. RequestGone if it is kept no more."""
        size, row_bytes = prefix.block_size, rows.raw.shape[1]
        names = prefix.hashes[first // size : rows.start // size]
        at_once = max(1, EARLIER_PART_BYTES // (size * row_bytes))
        for i in range(0, len(names), at_once):
            part = await self._found_rows(names[i : i + at_once])
            if part is None:
                raise RequestGone(
                    f"hidden states {first} to {rows.start} of a cached prompt were evicted; send the request again."
                )
            yield Rows(rows.kind, rows.dtype, first + i * size, part.reshape(-1, row_bytes))

    async def _found_rows(self, hashes: Sequence[bytes]) -> np.ndarray | None:
        """Of these blocks, uint8 `[bytes]`."""
        async with self._death_named():  # of this engine: the caller has another
            raw = await self.llm.engine_core.call_utility_async("omni_find_rows", list(hashes))
        return None if raw is None else np.frombuffer(raw, np.uint8)

    @contextlib.asynccontextmanager
    async def _death_named(self) -> AsyncIterator[None]:
        """Raises StageDied for what an engine's death breaks, also where the death is reported after what it broke."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, EngineDeadError) or (_may_be_death(error) and await self._dies())):
                raise
            raise self._died() from error

    async def _broken_off(self) -> OmniError:
        """Why the engine aborted a request by itself. One that is asked to stop aborts all of them, and then ends."""
        return self._died() if await self._dies() else self._gone()

    def _died(self) -> StageDied:
        return StageDied(f"the engine of stage {self._stage.model_stage} died; send the request again.")

    def _gone(self) -> RequestGone:
        return RequestGone(f"the engine of stage {self._stage.model_stage} gave it up; send it again.")

    def _not_finite(self) -> NotFinite:
        return NotFinite(
            f"stage {self._stage.model_stage} computed values for this request that are infinite or no numbers; "
            "send input of usual size."
        )

    async def _dies(self) -> bool:
        """Whether the engine is dead, or says so within `DEATH_S`: what reads its outputs ends then."""
        llm = self.llm
        if not llm.errored and llm.output_handler is not None:
            await asyncio.wait({llm.output_handler}, timeout=DEATH_S)
        return bool(llm.errored)

    async def _refusals_named(self, outputs: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """The outputs; RequestError for parameters that vLLM refuses only when it starts on the request."""
        try:
            async for output in outputs:
                yield output
        except VLLMClientError as error:
            raise refused(self._stage.model_stage, error) from error

    async def _start(
        self, request: OmniRequest, engine_input: EngineInput, sink: RowsSink, known: KnownOutput, hold: str
    ) -> AsyncGenerator[RequestOutput | None, None]:
        """The engine's outputs. Of a prompt of several steps whose rows are read: None for rows before the first."""
        prompt, interval, rows = engine_input.prompt, engine_input.stream_interval, engine_input.rows
        # What the engine's step could not read would end all requests there.
        check_together(rows, self._pipeline.limits.max_payload_elements)
        check_taken(self._stage.model_stage, self._spec, engine_input)
        extra = StageExtra(
            key=request.request_id,
            emit_rows=engine_input.emit_rows,
            given_tokens=len(engine_input.given_reply.token_ids) if engine_input.given_reply is not None else 0,
            rows_complete=engine_input.rows_complete,
            first_tokens=interval.first if interval is not None and request.streams_audio else 0,
            known=known.inputs,
            known_codes=known.codes if self._spec.has_residual_codes else None,
            prompt_codes=engine_input.prompt_codes,
            hold=hold if rows and rows[0].start else "",
            rows=tuple(part.to_bytes() for part in rows),
            pad_row=engine_input.pad_row.to_bytes() if engine_input.pad_row is not None else b"",
        )
        params = self._sampling.params(request, engine_input.sampling)
        if params.structured_outputs is not None and self._grammars is not None:
            await asyncio.to_thread(self._grammars.check, params)
        params.extra_args = extra.to_extra_args()
        rendered = await self._rendered(prompt)
        if extra.prompt_codes is not None:
            extra.prompt_codes.check_among(rendered["prompt_token_ids"])
        adapter = self._lora_requests.get(request.adapter)
        outputs = self._outputs(request.request_id, prompt, rendered, params, adapter)
        prefilled = len(rendered["prompt_token_ids"]) + len(known.inputs)
        has_parts = prefilled > self.llm.vllm_config.scheduler_config.max_num_batched_tokens
        if engine_input.emit_rows and engine_input.given_reply is None and has_parts:
            return sink.before_first(outputs)
        return outputs

    async def _outputs(
        self,
        request_id: str,
        prompt: Mapping[str, Any],
        rendered: Any,
        params: SamplingParams,
        adapter: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs. RequestGone where it gives the request up: vLLM makes an end without tokens of that.

        Processed media that the engine should have are sent by their names alone. It lacks those of a request that left
        before it was sent, and gives up a request that names them. vLLM forgets the names, so the next sending has the
        media.
        """
        has_begun = False
        for number in range(MOST_SENDINGS if rendered.get("mm_hashes") else 1):
            if number:
                rendered = await self._rendered(prompt)
            sent = self.llm.generate(rendered, params, request_id, lora_request=adapter, trace_headers=_trace_headers())
            async with contextlib.aclosing(sent):
                async for output in sent:
                    if output.outputs[0].stop_reason == NOT_FINITE:
                        raise self._not_finite()
                    if output.outputs[0].finish_reason == "error":
                        break
                    has_begun = True
                    yield output
                else:
                    return
            if has_begun:
                break
        if params.structured_outputs is not None and (has_begun or not rendered.get("mm_hashes")):
            raise GrammarRefused(NO_WAY)  # it would be given up again
        raise self._gone()

    async def _rendered(self, prompt: Mapping[str, Any]) -> Any:
        """The prompt as token ids, its media processed. RequestError for one that the engine cannot take."""
        try:
            parsed = parse_model_prompt(self.llm.model_config, prompt)
            (rendered,) = await self.llm.renderer.render_cmpl_async([parsed])
        except VLLMValidationError as error:
            if error.parameter in _LENGTHS:
                length = await asyncio.to_thread(self._least_tokens, prompt)
                raise PromptTooLong.of(length, self._max_prompt_tokens) from error
            raise RequestError(_unfit(prompt)) from error
        except (ValueError, VLLMClientError) as error:
            raise RequestError(_unfit(prompt)) from error
        tokens = len(rendered["prompt_token_ids"])
        if tokens > self._max_prompt_tokens:
            raise PromptTooLong.of(f"{tokens} tokens, media included", self._max_prompt_tokens)
        return rendered

    def _least_tokens(self, prompt: Mapping[str, Any]) -> str:
        """Of a prompt that vLLM did not read to its end; takes as long as reading as much as fits."""
        text, tokenizer = prompt.get("prompt"), self.llm.renderer.get_tokenizer()
        at_least = "at least " if prompt.get("multi_modal_data") else ""
        if text is None:
            return f"{at_least}{len(prompt['prompt_token_ids'])} tokens"
        of_most_chars = -(-len(text) // tokenizer.max_chars_per_token)
        if of_most_chars > self._max_prompt_tokens:
            return f"at least {of_most_chars} tokens"
        return f"{at_least}{len(tokenizer.encode(text))} tokens"

    @property
    def _max_prompt_tokens(self) -> int:
        """What leaves room for one new token; the configured limit is on what enters the pipeline."""
        fitting = int(self.llm.model_config.max_model_len) - 1
        is_entry = not self._stage.engine_input_source
        return min(fitting, self._pipeline.limits.max_prompt_tokens) if is_entry else fitting

    def _chunk_maker(
        self, sink: RowsSink, known: KnownOutput, given_reply: GivenReply | None, calls: CallReader | None
    ) -> ChunkMaker:
        if "codes" not in self._spec.emits:
            return ChunkMaker(sink, known, given_reply, self._bytes_of, calls)
        return CodesMaker(sink, known, given_reply, self._bytes_of, calls, self._spec.codeless_ends)

    def _call_reader(self, request: OmniRequest) -> CallReader | None:
        if request.tool_use is None or not self._traits.tool_parser:
            return None
        return CallReader(self._traits.tool_parser, request.tool_use, self.llm.renderer.get_tokenizer())

    def _fed(
        self, request_id: str, session: ARSession, sink: RowsSink, cleanup: contextlib.AsyncExitStack
    ) -> asyncio.Task[bool]:
        feeder = asyncio.create_task(self._feed(request_id, session, sink))
        cleanup.push_async_callback(_cancelled, feeder)
        return feeder

    async def _feed(self, request_id: str, session: ARSession, sink: RowsSink) -> bool:
        """Pushes rows as they come. Returns whether all came; else there was nothing to do, and the request ends.

        When their source breaks, the request ends too, for it could never go on.
        """
        window, complete = PushWindow(self._pusher), False
        await sink.admitted.wait()
        try:
            async for later in session.later_rows():
                complete = later.complete
                await window.push(RowsPush(request_id, later.rows.to_bytes(), later.complete))
            await window.all_arrived()
        except Exception:
            await self.llm.abort(request_id)
            raise
        if not complete:
            await self.llm.abort(request_id)
        return complete

    async def _send_rows(self, pushes: list[RowsPush]) -> Refusals:
        refusals: Refusals = await self.llm.engine_core.call_utility_async(
            "omni_push_rows", msgspec.to_builtins(pushes, builtin_types=(bytes,))
        )
        return refusals

    def check_runs(self) -> None:
        """See `Stage.check_runs`."""
        if self._llm is None or self._llm.errored:
            raise self._died()

    async def check_health(self) -> None:
        """See `Stage.check_health`; asks the engine itself."""
        async with self._death_named():
            await self.llm.check_health()
            await self._probe.check()

    async def _progress(self) -> Progress:
        counts = await self.counts()
        # Where some wait for another stage's rows, those that are not admitted yet may wait for what these hold.
        held = counts["held"] - counts["blocked"]
        waiting = counts["waiting"] - counts["compiling"]  # a grammar may take long, and no step waits for it
        ready = counts["running"] - held if counts["held"] else counts["running"] + waiting
        return Progress(counts["steps"], ready > 0)

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = await self.llm.engine_core.call_utility_async("omni_counts")
        return counts

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._probe.close()
        if llm.output_handler is not None:
            await _cancelled(llm.output_handler)  # or it would report the engine's end as its death
        await asyncio.to_thread(llm.shutdown)


def _may_be_death(error: Exception) -> bool:
    """Whether the engine failed a call, of ours or of vLLM's own: vLLM raises a bare Exception for that."""
    return isinstance(error, EngineGenerateError) or type(error) is Exception


def _trace_headers() -> dict[str, str] | None:
    """By what vLLM's spans, if it makes any, belong to the request's trace; None without one."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers or None


def _unfit(prompt: Mapping[str, Any]) -> str:
    """The message for a prompt that was refused. vLLM's own message has the media in it, and where they lie in memory.

    The API refuses by name what is known to be refused here.
    """
    media: Mapping[str, Any] = prompt.get("multi_modal_data") or {}
    if not media:
        return "the model cannot take the prompt's text or tokens; send others."
    counted = ", ".join(f"{kind}: {len(items)}" for kind, items in media.items())
    return f"the model cannot take the prompt's media ({counted}) with its text; send fewer or others."


def _forget_media_in_turn(renderer: BaseRenderer) -> None:
    """Has the names of media that the engine lacks forgotten between two prompts.

    vLLM forgets them in the event loop, while a prompt may be processed that has looked which names are known.
    """
    cache = renderer.mm_processor_cache
    if cache is not None:
        cache.invalidate = functools.partial(renderer._mm_executor.submit, cache.invalidate)  # type: ignore[method-assign]


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Ends the task, whatever it was at. Never raises its error, which would end what cleans up in its place."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def check_taken(stage: str, spec: ARSpec, given: EngineInput) -> None:
    """Raises PayloadError for what a session gives and the stage's model would never see."""
    for part in (*given.rows, *filter(None, [given.pad_row])):
        if not (spec.takes_ids if part.kind == IDS else spec.takes_rows):
            raise PayloadError(f"Stage {stage} was given {part.kind!r} beside tokens, which its spec does not take.")
    if given.prompt_codes is None:
        return
    if not spec.has_residual_codes:
        raise PayloadError(f"Stage {stage} was given codes of its prompt, but its spec has no residual codes.")
    if given.rows and given.rows[0].prefix is not None:
        # Blocks would be named by the source's prompt alone, whatever the codes are.
        raise PayloadError(
            f"Stage {stage} was given codes of its prompt, and a prefix with its hidden states; leave one out."
        )
