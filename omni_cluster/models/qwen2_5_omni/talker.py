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
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from omni_cluster.inputs import OmniRequest, OmniTokensPrompt
from omni_cluster.models.checkpoint_files import tensor_rows
from omni_cluster.models.family import EngineInput, Hold, LaterRows, StreamInterval
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.voices import Voice
from omni_cluster.outputs import StageChunk
from omni_cluster.rows import AdditionalInformationPayload, PrefixHashes, PromptEmbedsPayload, RowsChunk

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


@dataclass(frozen=True, slots=True)
class Beginning:
    """The thinker's first rows `[n, H]`, up to before or behind the P prompt positions; `ended`: no further rows come.

    `start`: the position of the first one; what is before it the engine has.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ended: bool
    start: int = 0
    prefix: PrefixHashes | None = None

    @property
    def prompt_length(self) -> int:
        return self.positions.shape[1]

    @property
    def is_part(self) -> bool:
        return self.start + self.rows.shape[0] < self.prompt_length


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
        beginning = await self._beginning()
        if beginning is None:
            return None
        self._prompt_length = beginning.prompt_length
        self._next_row = beginning.start
        return EngineInput(
            prompt=dict(self._tokens_prompt(beginning)),
            sampling={
                "stop_token_ids": list(self._ids.codec_stops),
                "ignore_eos": True,
                "detokenize": False,
            },
            rows_complete=beginning.ended,
            is_part=not beginning.ended and (beginning.is_part or bool(self.known.token_ids)),
            stream_interval=self._stream_interval,
            rows_start=beginning.start,
            prefix=beginning.prefix,
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        """See `ARSession.later_rows`: ends without complete rows after a reply of fewer than two tokens."""
        async for chunk in self._upstream:
            new = chunk.rows.after(self._next_row) if chunk.rows is not None else None
            if new is not None:
                yield LaterRows(self._talker_rows(new.rows), complete=False)
        if self._next_row > self._prompt_length:
            yield LaterRows(self._embeddings.eos[None], complete=True)

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
                missing = RowsChunk(held, await anext(parts), rows.positions, prefix=rows.prefix)
                yield msgspec.structs.replace(chunk, rows=missing, finish_reason=None)
                async for part in parts:
                    missing = RowsChunk(missing.end, part)
                    yield StageChunk(rows=missing)
            yield StageChunk(rows=RowsChunk(rows.start, rows.rows), finish_reason=chunk.finish_reason)

    async def _beginning(self) -> Beginning | None:
        """A part of the prompt as soon as it has come; a whole prompt with what first comes of the reply."""
        rows: list[RowsChunk] = []
        positions, end = None, 0
        async for chunk in self._upstream:
            new = chunk.rows.after(end) if chunk.rows is not None else None
            if new is not None:
                positions = positions if new.positions is None else self._of_prompt(new.positions, chunk)
                rows.append(new)
                end = new.end
            if positions is not None and self._may_begin(end, positions.shape[1], chunk):
                prefix = rows[0].prefix
                return Beginning(
                    torch.cat([each.rows for each in rows]),
                    positions,
                    ended=chunk.finish_reason is not None,
                    start=rows[0].start,
                    prefix=None if prefix is None else prefix.up_to(positions.shape[1]),
                )
        return None

    @staticmethod
    def _may_begin(end: int, prompt_length: int, chunk: StageChunk) -> bool:
        return end > prompt_length or (end < prompt_length and chunk.finish_reason is None)

    def _of_prompt(self, positions: torch.Tensor, chunk: StageChunk) -> torch.Tensor:
        """The positions without those of a given reply, which the thinker had in its prompt."""
        return positions if self._request.reply is None else positions[:, : -len(chunk.token_ids)]

    def _tokens_prompt(self, beginning: Beginning) -> OmniTokensPrompt:
        length = beginning.prompt_length
        rows = self._talker_rows(beginning.rows)
        if beginning.ended:
            rows = torch.cat([rows, self._embeddings.eos[None].to(rows.dtype)])
        return OmniTokensPrompt(
            prompt_token_ids=[self._ids.codec_mask] * length + [self._ids.codec_pad, self._ids.codec_bos],
            prompt_embeds=PromptEmbedsPayload.from_tensor(rows),
            additional_information=AdditionalInformationPayload.from_mapping(
                {"positions": talker_positions(beginning.positions), "pad_row": self._embeddings.pad}
            ),
        )

    def _talker_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The thinker's next rows as the talker takes them: the voice's start comes between prompt and reply."""
        of_prompt = self._prompt_length - self._next_row
        self._next_row += rows.shape[0]
        if of_prompt < 0 or rows.shape[0] <= of_prompt:
            return rows
        start = self._embeddings.voices[self._voice][None].to(rows.dtype)
        return torch.cat([rows[:of_prompt], start, rows[of_prompt:]])


async def in_parts(upstream: AsyncIterator[StageChunk]) -> AsyncIterator[StageChunk]:
    """The chunks, cut where one has more than `PART_ROWS` rows; its end comes with the last part."""
    async for chunk in upstream:
        rows = chunk.rows
        if rows is None or rows.rows.shape[0] <= PART_ROWS:
            yield chunk
            continue
        first = RowsChunk(rows.start, rows.rows[:PART_ROWS], rows.positions, prefix=rows.prefix)
        yield msgspec.structs.replace(chunk, rows=first, finish_reason=None)
        for start in range(rows.start + PART_ROWS, rows.end, PART_ROWS):
            offset = start - rows.start
            part = RowsChunk(start, rows.rows[offset : offset + PART_ROWS])
            yield StageChunk(rows=part, finish_reason=chunk.finish_reason if part.end == rows.end else None)


def talker_positions(positions: torch.Tensor) -> torch.Tensor:
    """The thinker's M-RoPE positions `[3, P]` with two text positions after them, `[3, P + 2]`."""
    # Not after the largest: frames that outlast their sound are at later positions than the text behind them.
    following = int(positions[:, -1].max()) + 1 + torch.arange(2)
    return torch.cat([positions, following.expand(3, 2)], dim=1)
