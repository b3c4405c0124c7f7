"""The talker's input, made of the thinker's tokens as `generate` of transformers' Qwen3-Omni does.

A position has a text side, and beside it a codec side or none; the engine adds them. The text side is an id of the
thinker's vocabulary, but for media, whose rows come from the thinker. The prompt is the conversation's user turns, and
nine positions that begin the answer: the turn's header without a codec side, then four pads, the start of speech and
the reply's first token, beside marks of the codec and the voice. While decoding, one more token of the reply a code;
after the last one the end of speech once, then pads for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from omni_cluster.models.family import EngineInput, LaterRows, StreamInterval
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.talker_prompt import HEADER, answer_start, check_ids, prompt_rows
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows


@dataclass
class ThinkerOutput:
    """What came from the thinker, of `num_ids` ids, so far.

    `is_given`: its reply is the request's, all of which is spoken. `call_mark`: with this token calls of tools begin,
    which are not spoken; `calls_at`: their place in the reply.
    """

    num_ids: int
    is_given: bool
    call_mark: int | None = None
    calls_at: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    reply_ids: list[int] = field(default_factory=list)
    has_ended: bool = False
    positions: np.ndarray | None = None
    media_rows: list[Rows] = field(default_factory=list)
    """Of the prompt, at some positions each."""

    def take(self, chunk: StageChunk) -> None:
        """What comes twice is dropped. Raises TokenError for an id that the thinker has not.

        On the device it would be an index out of range, which ends all requests.
        """
        if chunk.prompt_token_ids is not None:
            check_ids(chunk.prompt_token_ids, self.num_ids)
            self.prompt_ids = chunk.prompt_token_ids
        check_ids(chunk.token_ids, self.num_ids)
        self.reply_ids += chunk.token_ids[max(0, len(self.reply_ids) - chunk.token_start) :]
        self.has_ended = self.has_ended or chunk.finish_reason is not None
        if self.calls_at is None:
            self.calls_at = self._call_in(chunk)
        if chunk.rows is not None:
            self._take_rows(chunk.rows)

    def _call_in(self, chunk: StageChunk) -> int | None:
        """A call without its mark, which was spelled in pieces, is noticed when it is read."""
        if self.call_mark in chunk.token_ids:
            return chunk.token_start + chunk.token_ids.index(self.call_mark)
        return chunk.token_start if chunk.calls else None

    def _take_rows(self, rows: Rows) -> None:
        if rows.positions is not None:
            self.positions = rows.positions
        new = rows.after(self.media_rows[-1].end) if self.media_rows else rows
        if new is not None:
            self.media_rows.append(new.without_facts())

    @property
    def is_over(self) -> bool:
        """Whether nothing more of the reply will be spoken."""
        return self.has_ended or self.calls_at is not None

    def between(self, first: int, end: int) -> list[int]:
        """Tokens of the prompt and the reply behind it."""
        prompt = self.prompt_ids or ()
        of_reply = (max(0, place - len(prompt)) for place in (first, end))
        return [*prompt[first:end], *self.reply_ids[slice(*of_reply)]]

    def spoken_end(self, start: int) -> int:
        """Where the tokens from place `start` on end that are spoken for sure: a reply's last one, its end, is not.

        Any new token may be the last one, but for the first: a reply of one token ends with it.
        """
        said = len(self.reply_ids) if self.calls_at is None else self.calls_at
        end = len(self.prompt_ids or ()) + said
        if self.is_given or self.calls_at is not None:
            return end
        return end - 1 if self.has_ended or end - start > 1 else end


class TalkerSession:
    """One request in the talker. It has no upstream where all codes are known."""

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk] | None,
        ids: TalkerIds,
        voice_id: int,
        stream_interval: StreamInterval | None = None,
        call_mark: int | None = None,
    ) -> None:
        """`call_mark`: the token of the thinker that begins a call of a tool."""
        self.known = request.known_of("talker")
        self._upstream = _nothing() if upstream is None else upstream
        self._ids = ids
        self._voice_id = voice_id
        self._stream_interval = stream_interval
        self._thinker = ThinkerOutput(ids.text.num_ids, request.reply is not None)
        if request.tool_use is not None:
            self._thinker.call_mark = call_mark
            self._thinker.calls_at = 0 if request.tool_use.must_call else None
        self._reply_start = 0
        """Where the reply begins among the tokens of prompt and reply."""
        self._given = 0
        """Where the tokens end that the engine has."""
        self._next_position = 0

    async def prompt(self) -> EngineInput | None:
        """The prompt, as soon as the reply's first token is there.

        None for a reply of fewer than two tokens, if that is known so early: the last one, its end, is not spoken.
        And when all codes are known.
        """
        if self.known.has_ended or not await self._has_begun():
            return None
        thinker, codec = self._thinker, self._ids.codec
        self._given = self._reply_start + 1
        tokens = thinker.between(0, self._given)
        rows = prompt_rows(tokens, thinker.positions, thinker.media_rows, self._ids.text)
        length = self._next_position = rows[-1].end
        marks = [codec.nothink, codec.think_bos, codec.think_eos, self._voice_id, codec.pad, codec.bos]
        return EngineInput(
            prompt={"prompt_token_ids": [codec.unspoken] * (length - len(marks)) + marks},
            sampling={"stop_token_ids": [codec.eos], "ignore_eos": True, "detokenize": False},
            rows_complete=thinker.is_over,
            is_part=not thinker.is_over and self.known.made > 0,
            stream_interval=self._stream_interval,
            rows=[*rows, *self._new_rows()],
            pad_row=Rows.of_ids(0, [self._ids.text.pad]),
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        """See `ARSession.later_rows`: ends without complete rows after a reply of fewer than two tokens."""
        async for chunk in self._upstream:
            self._thinker.take(chunk)
            if self._thinker.is_over:
                break
            for rows in self._new_rows():
                yield LaterRows(rows, complete=False)
        self._thinker.has_ended = True
        for rows in self._new_rows():
            yield LaterRows(rows, complete=True)

    async def _has_begun(self) -> bool:
        """Waits for the first token that is spoken; False when there is none."""
        thinker = self._thinker
        async for chunk in self._upstream:
            thinker.take(chunk)
            if thinker.prompt_ids is None or not thinker.reply_ids:
                continue
            self._reply_start = answer_start(thinker.prompt_ids, self._ids.text) + HEADER
            if thinker.spoken_end(self._reply_start) > self._reply_start:
                return True
        return False

    def _new_rows(self) -> list[Rows]:
        """What follows the tokens that the engine has, if anything; with the end of speech where all have come."""
        end = self._thinker.spoken_end(self._reply_start)
        new, self._given = self._thinker.between(self._given, end), max(self._given, end)
        if self._thinker.is_over and end > self._reply_start:
            new.append(self._ids.text.eos)
        start, self._next_position = self._next_position, self._next_position + len(new)
        return [Rows.of_ids(start, new)] if new else []


async def _nothing() -> AsyncIterator[StageChunk]:
    return
    yield
