"""The talker's input, made of the thinker's conditioning rows as `generate` of transformers' Qwen2.5-Omni does.

The rows of a prompt that takes the thinker several steps come in parts; the talker begins with the first. What it made
of the first blocks of an earlier prompt it has in its own cache, under the thinker's names of them: a prompt that
begins with the same ones needs no rows for them.
Prompt of P thinker positions: rows 0..P-1 of the thinker on codec mask ids, then the voice's start embedding on codec
pad, then the row of the reply's first token on codec bos. While decoding, one more row of the reply a code; after the
reply's last row the text eos embedding once, then the text pad embedding for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from omni_cluster.models.checkpoint_files import tensor_rows
from omni_cluster.models.family import EngineInput, Hold, LaterRows, StreamInterval
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.thinker import ROWS
from omni_cluster.models.qwen2_5_omni.voices import Voice
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows

TOKEN_TABLE = "thinker.model.embed_tokens.weight"
PART_ROWS = 2048
"""Rows that are handed to the engine at once: what it takes in a step by default. Those of earlier turns come all at
once, and each part is copied on its way while the one before it is computed."""


@dataclass(frozen=True, slots=True)
class TextEmbeddings:
    """Rows `[H]` of the thinker's token table that the talker is fed beside the reply's."""

    eos: torch.Tensor
    pad: torch.Tensor
    voices: dict[str, torch.Tensor]

    @classmethod
    def load(cls, folder: Path, ids: SpecialIds, voices: dict[str, Voice]) -> TextEmbeddings:
        rows = tensor_rows(folder, TOKEN_TABLE, [ids.text_eos, ids.text_pad, *(v.bos_token for v in voices.values())])
        return cls(rows[0], rows[1], dict(zip(voices, rows[2:], strict=True)))


class TalkerSession:
    """One request in the talker. It has no upstream where all codes are known."""

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk] | None,
        ids: SpecialIds,
        embeddings: TextEmbeddings,
        voice: str,
        stream_interval: StreamInterval,
        hold: Hold,
    ) -> None:
        self._request = request
        self.known = request.known_of("talker")
        self._hold = hold
        self._upstream = in_parts(self._lacking_nothing(upstream))
        self._ids = ids
        self._embeddings = embeddings
        self._voice = voice
        self._stream_interval = stream_interval
        self._prompt_length = 0
        self._next_row = 0

    async def prompt(self) -> EngineInput | None:
        """The prompt with the rows that came first.

        None for a reply of fewer than two tokens, if that is known so early: no row of it comes to be spoken. And when
        all codes are known.
        """
        if self.known.has_ended:
            return None
        first, ended = await self._beginning()
        if first is None or first.positions is None:
            return None
        length = self._prompt_length = first.positions.shape[1]
        rows = self._talker_rows(first.without_facts())
        rows[0] = replace(rows[0], positions=talker_positions(first.positions), prefix=first.prefix)
        if ended:
            rows.append(self._row(self._embeddings.eos, rows[-1].end))
        return EngineInput(
            prompt={
                "prompt_token_ids": [self._ids.codec_mask] * length + [self._ids.codec_pad, self._ids.codec_bos],
            },
            sampling={
                "stop_token_ids": list(self._ids.codec_stops),
                "ignore_eos": True,
                "detokenize": False,
            },
            rows_complete=ended,
            is_part=not ended and (first.end < length or bool(self.known.made)),
            stream_interval=self._stream_interval,
            rows=rows,
            pad_row=self._row(self._embeddings.pad, 0),
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        """See `ARSession.later_rows`: ends without complete rows after a reply of fewer than two tokens."""
        async for chunk in self._upstream:
            new = chunk.rows.after(self._next_row) if chunk.rows is not None else None
            for rows in [] if new is None else self._talker_rows(new):
                yield LaterRows(rows, complete=False)
        if self._next_row > self._prompt_length:
            yield LaterRows(self._row(self._embeddings.eos, self._next_row + 1), complete=True)

    async def _lacking_nothing(self, upstream: AsyncIterator[StageChunk] | None) -> AsyncIterator[StageChunk]:
        """The chunks; the first rows that were left out, and that the engine has not, ahead of them."""
        if upstream is None:
            return
        async for chunk in upstream:
            rows = chunk.rows
            if rows is None or rows.earlier is None or rows.positions is None or rows.prefix is None:
                yield chunk
                continue
            of_prompt = self._of_prompt(rows.positions, chunk).shape[1]
            held = await self._hold(rows.prefix.up_to(min(rows.start, of_prompt)))
            if held == rows.start:
                yield chunk
                continue
            async with contextlib.aclosing(rows.earlier(held)) as parts:
                first = replace(await anext(parts), positions=rows.positions, prefix=rows.prefix, packed=None)
                yield msgspec.structs.replace(chunk, rows=first, finish_reason=None)
                async for part in parts:
                    yield StageChunk(rows=part)
            yield StageChunk(rows=rows.without_facts(), finish_reason=chunk.finish_reason)

    async def _beginning(self) -> tuple[Rows | None, bool]:
        """The first rows, None if too few come; and whether they are all.

        A part of the prompt goes on as soon as it has come, a whole prompt with what first comes of the reply.
        """
        parts: list[Rows] = []
        async for chunk in self._upstream:
            new = chunk.rows if not parts or chunk.rows is None else chunk.rows.after(parts[-1].end)
            if new is not None:
                parts.append(self._with_prompt_alone(new, chunk))
            if parts and parts[0].positions is not None:
                length = parts[0].positions.shape[1]
                if self._may_begin(parts[-1].end, length, chunk):
                    return Rows.joined(parts), chunk.finish_reason is not None
        return None, True

    def _with_prompt_alone(self, rows: Rows, chunk: StageChunk) -> Rows:
        """First rows with positions and names of the prompt, without those of a given reply."""
        if rows.positions is None:
            return rows
        positions = self._of_prompt(rows.positions, chunk)
        prefix = None if rows.prefix is None else rows.prefix.up_to(positions.shape[1])
        return replace(rows, positions=positions, prefix=prefix, packed=None)

    @staticmethod
    def _may_begin(end: int, prompt_length: int, chunk: StageChunk) -> bool:
        return end > prompt_length or (end < prompt_length and chunk.finish_reason is None)

    def _of_prompt(self, positions: np.ndarray, chunk: StageChunk) -> np.ndarray:
        """The positions without those of a given reply, which the thinker had in its prompt."""
        return positions if self._request.reply is None else positions[:, : -len(chunk.token_ids)]

    def _talker_rows(self, rows: Rows) -> list[Rows]:
        """The thinker's next rows where the talker takes them: the voice's start comes between prompt and reply."""
        self._next_row, length = rows.end, self._prompt_length
        of_prompt, of_reply = rows.before(length), rows.after(length)
        if of_reply is None:
            return [rows]
        voice = [self._row(self._embeddings.voices[self._voice], length)] if of_reply.start == length else []
        return [*([] if of_prompt is None else [of_prompt]), *voice, of_reply.moved(1)]

    def _row(self, embedding: torch.Tensor, position: int) -> Rows:
        return Rows.of(ROWS, position, embedding[None])


async def in_parts(upstream: AsyncIterator[StageChunk]) -> AsyncIterator[StageChunk]:
    """The chunks, cut where one has more than `PART_ROWS` rows; its end comes with the last part."""
    async for chunk in upstream:
        rest, is_first = chunk.rows, True
        if rest is None or len(rest.raw) <= PART_ROWS:
            yield chunk
            continue
        while rest is not None:
            part = rest.before(rest.start + PART_ROWS)
            rest = rest.after(rest.start + PART_ROWS)
            of_part = chunk if is_first else StageChunk()
            yield msgspec.structs.replace(
                of_part, rows=part, finish_reason=chunk.finish_reason if rest is None else None
            )
            is_first = False


def talker_positions(positions: np.ndarray) -> np.ndarray:
    """The thinker's M-RoPE positions int64 `[3, P]` with two text positions after them, `[3, P + 2]`."""
    # Not after the largest: frames that outlast their sound are at later positions than the text behind them.
    following = int(positions[:, -1].max()) + 1 + np.arange(2)
    return np.concatenate([positions, np.broadcast_to(following, (3, 2))], axis=1)
