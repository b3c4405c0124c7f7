"""What a stage makes of vLLM's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from omni_cluster.models.family import EngineInput, GivenReply
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput
from omni_cluster.types.outputs import CallDelta, StageChunk, TokenChoice, TokenLogprob
from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.output_processor import RowsSink
from omni_cluster.vllm_engine.tool_calls import CallReader


def is_aborted(output: RequestOutput | None) -> bool:
    """Whether the request ended before its end, by our word or by the engine's."""
    return output is not None and output.outputs[0].finish_reason == "abort"


def is_only_said(engine_input: EngineInput, known: KnownOutput) -> bool:
    """Whether all that the stage makes is there, and no row of it is read: the engine has nothing to compute."""
    return not engine_input.emit_rows and (known.has_ended or engine_input.given_reply is not None)


def said_chunk(known: KnownOutput, given_reply: GivenReply | None, prompt_ids: Sequence[int]) -> StageChunk:
    """What is left to say where `is_only_said`: a given reply, or how the known output ended; and the prompt's ids."""
    if given_reply is not None:
        return given_chunk(given_reply, prompt_ids)
    return StageChunk(known.made, prompt_token_ids=tuple(prompt_ids), finish_reason=known.finish_reason)


def given_chunk(given_reply: GivenReply, prompt_ids: Sequence[int]) -> StageChunk:
    """A given reply; the engine's prompt ends with it."""
    return StageChunk(
        token_ids=given_reply.token_ids,
        text=given_reply.text,
        prompt_token_ids=tuple(prompt_ids)[: len(prompt_ids) - len(given_reply.token_ids)],
        finish_reason="stop",
    )


class ChunkMaker:
    """Turns vLLM's outputs of one request, which are deltas, into chunks with absolute positions, behind `known`.

    `calls` tells calls of tools apart from the text: they are not spoken, so rows from the first one on stay here.
    """

    def __init__(
        self,
        sink: RowsSink,
        known: KnownOutput,
        given_reply: GivenReply | None,
        bytes_of: Callable[[int], bytes],
        calls: CallReader | None = None,
    ) -> None:
        """`bytes_of`: a token's, by its id; asked for tokens whose logprobs are wanted."""
        self._sink = sink
        self._bytes_of = bytes_of
        self._calls = calls
        self._prompt_length = 0
        self._first_call: int | None = 0 if calls is not None and calls.is_all else None
        self._note_call(0, known.token_ids)
        self._known = known
        self._given_reply = given_reply
        self._position = known.made
        self._is_first = True

    def large_rows(self) -> StageChunk | None:
        """Rows that go ahead of the next chunk: a chunk of their own spares the copy that joins them with its rows."""
        rows = None if self._given_reply is not None else self._of_text(self._sink.take_large())
        return None if rows is None else StageChunk(self._position, rows=rows)

    def make(self, output: RequestOutput | None) -> StageChunk:
        """Makes a chunk of what the engine put out; None: of rows that came before its first output."""
        if output is None:
            return StageChunk(self._position, rows=self._of_text(self._sink.take()))
        if self._given_reply is not None:
            return self._given(output, self._given_reply)
        return self._ending(output) if self._known.has_ended else self._made(output)

    def _given(self, output: RequestOutput, given_reply: GivenReply) -> StageChunk:
        """The given reply with its rows, as one chunk. The one token that vLLM samples after it is dropped."""
        said = given_chunk(given_reply, output.prompt_token_ids or ())
        return replace(said, rows=self._sink.take(), cached_tokens=output.num_cached_tokens or 0)

    def _ending(self, output: RequestOutput) -> StageChunk:
        """The rows of an output that is known to its end. The one token that vLLM samples after it is dropped."""
        return StageChunk(
            self._position,
            rows=self._of_text(self._sink.take()),
            prompt_token_ids=tuple(output.prompt_token_ids or ()),
            finish_reason=self._known.finish_reason,
        )

    def _made(self, output: RequestOutput) -> StageChunk:
        completion = output.outputs[0]
        first, self._is_first = self._is_first, False
        self._note_call(self._position, completion.token_ids)
        text, calls = self._read(completion)
        if calls and self._first_call is None:
            self._first_call = self._position  # its mark was spelled in pieces, which have gone on
        chunk = StageChunk(
            token_start=self._position,
            token_ids=tuple(completion.token_ids),
            text=text,
            rows=self._of_text(self._sink.take()),
            prompt_token_ids=tuple(output.prompt_token_ids or ()) if first else None,
            finish_reason=completion.finish_reason,
            choices=token_choices(completion, self._bytes_of),
            cached_tokens=(output.num_cached_tokens or 0) if first else 0,
            calls=calls,
        )
        self._position = chunk.token_end
        return chunk

    def _read(self, completion: CompletionOutput) -> tuple[str, tuple[CallDelta, ...]]:
        """What of the next text is text, and what calls; text before a request was begun again is read ahead of it."""
        text = completion.text or ""
        if self._calls is None:
            return text, ()
        known, self._sink.known_text = self._sink.known_text, ""
        self._calls.read(known)
        said, calls = self._calls.read(text)
        if completion.finish_reason is None:
            return said, calls
        rest, last = self._calls.rest(completion.finish_reason)
        return said + rest, calls + last

    def _note_call(self, position: int, token_ids: Sequence[int]) -> None:
        """Where in the reply the first call begins, if it does in these tokens from `position` on."""
        mark = self._calls.mark if self._calls is not None else None
        if self._first_call is None and mark is not None and mark in token_ids:
            self._first_call = position + list(token_ids).index(mark)

    def _of_text(self, rows: Rows | None) -> Rows | None:
        """The rows without those of calls."""
        if rows is not None and rows.positions is not None:
            self._prompt_length = rows.positions.shape[1]
        if rows is None or self._first_call is None:
            return rows
        return rows.before(self._prompt_length + self._first_call)


class CodesMaker(ChunkMaker):
    """Of a stage that emits codes: its tokens but for the one that ends them, each with its residual codes."""

    def __init__(
        self,
        sink: RowsSink,
        known: KnownOutput,
        given_reply: GivenReply | None,
        bytes_of: Callable[[int], bytes],
        calls: CallReader | None = None,
        codeless_ends: frozenset[str] = ARSpec.codeless_ends,
    ) -> None:
        """`codeless_ends`: see `ARSpec`."""
        super().__init__(sink, known, given_reply, bytes_of, calls)
        self._codeless_ends = codeless_ends
        self._ahead: Rows | None = None
        """Residual codes of tokens that vLLM has not put out yet."""

    def _made(self, output: RequestOutput) -> StageChunk:
        chunk = super()._made(output)
        tokens = chunk.token_ids[:-1] if chunk.finish_reason in self._codeless_ends else chunk.token_ids
        values = self._with_residual(chunk.token_start, tokens, chunk.rows)
        codes = Codes.of(chunk.token_start, values) if tokens else None
        return replace(chunk, token_start=0, token_ids=(), prompt_token_ids=None, rows=None, codes=codes)

    def _with_residual(self, start: int, tokens: Sequence[int], new: Rows | None) -> np.ndarray:
        """The codes of these tokens, int16 `[n, Q]`."""
        values, end = np.array(tokens, np.int16)[:, None], start + len(tokens)
        parts = [rows for rows in (self._ahead, new) if rows is not None]
        if not parts:
            return values
        residual = Rows.joined(parts)
        self._ahead, own = residual.after(end), residual.before(end)
        return values if own is None else np.hstack([values, own.tensor().numpy()])


def token_choices(made: CompletionOutput, bytes_of: Callable[[int], bytes]) -> tuple[TokenChoice, ...]:
    """What vLLM says of the tokens that it made since it last spoke, without the one that only ends the text."""
    if not made.logprobs:
        return ()
    ends = made.finish_reason == "stop" and not isinstance(made.stop_reason, str)
    spoken = made.token_ids[:-1] if ends else made.token_ids
    return tuple(_choice(token_id, of, bytes_of) for token_id, of in zip(spoken, made.logprobs, strict=False))


def _choice(token_id: int, candidates: Mapping[int, Logprob], bytes_of: Callable[[int], bytes]) -> TokenChoice:
    """vLLM gives the likeliest tokens and the sampled one, which may be one of them."""
    choices = {i: TokenLogprob(one.decoded_token or "", one.logprob, bytes_of(i)) for i, one in candidates.items()}
    ranked = sorted(candidates, key=lambda i: candidates[i].rank or 0)
    return TokenChoice(choices[token_id], tuple(choices[i] for i in ranked))
