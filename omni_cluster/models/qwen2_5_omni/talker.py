"""The talker's input, made of the thinker's conditioning rows as `generate` of transformers' Qwen2.5-Omni does.

Prompt of P thinker positions: rows 0..P-1 of the thinker on codec mask ids, then the voice's start embedding on codec
pad, then the row of the reply's first token on codec bos. While decoding, one more row of the reply a code; after the
reply's last row the text eos embedding once, then the text pad embedding for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch

from omni_cluster.inputs import OmniRequest, OmniTokensPrompt
from omni_cluster.models.checkpoint_files import tensor_rows
from omni_cluster.models.family import EngineInput, LaterRows, StreamInterval
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.voices import Voice
from omni_cluster.outputs import StageChunk
from omni_cluster.payloads import AdditionalInformationPayload, PromptEmbedsPayload

TOKEN_TABLE = "thinker.model.embed_tokens.weight"


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
class Prefix:
    """What the talker needs of the thinker before its own prefill: all prompt rows and at least one reply row.

    `rows` `[P + k, H]`, k >= 1; `positions` int64 `[3, P]`; `ended`: the reply has no further rows.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ended: bool

    @property
    def prompt_length(self) -> int:
        return self.positions.shape[1]


class TalkerSession:
    """One request in the talker."""

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk],
        ids: SpecialIds,
        embeddings: TextEmbeddings,
        voice: str,
        stream_interval: StreamInterval,
    ) -> None:
        self._request = request
        self._upstream = upstream
        self._ids = ids
        self._embeddings = embeddings
        self._voice = voice
        self._stream_interval = stream_interval
        self._next_row = 0

    async def prompt(self) -> EngineInput | None:
        """None for a reply of fewer than two tokens: no row of it comes, and there is nothing to speak."""
        prefix = await self._collect_prefix()
        if prefix is None:
            return None
        self._next_row = prefix.rows.shape[0]
        return EngineInput(
            prompt=dict(self._tokens_prompt(prefix)),
            sampling={
                "stop_token_ids": list(self._ids.codec_stops),
                "ignore_eos": True,
                "detokenize": False,
            },
            rows_complete=prefix.ended,
            stream_interval=self._stream_interval,
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        async for chunk in self._upstream:
            new = chunk.rows.after(self._next_row) if chunk.rows is not None else None
            if new is not None:
                self._next_row = new.end
                yield LaterRows(new.rows, complete=False)
        yield LaterRows(self._embeddings.eos[None], complete=True)

    async def _collect_prefix(self) -> Prefix | None:
        rows, positions, end, ended = [], None, 0, True
        async for chunk in self._upstream:
            new = chunk.rows.after(end) if chunk.rows is not None else None
            if new is not None:
                positions = positions if new.positions is None else self._of_prompt(new.positions, chunk)
                rows.append(new.rows)
                end = new.end
            if positions is not None and end > positions.shape[1]:
                ended = chunk.finish_reason is not None
                break
        if positions is None or end <= positions.shape[1]:
            return None
        return Prefix(torch.cat(rows), positions, ended)

    def _of_prompt(self, positions: torch.Tensor, chunk: StageChunk) -> torch.Tensor:
        """The positions without those of a given reply, which the thinker had in its prompt."""
        return positions if self._request.reply is None else positions[:, : -len(chunk.token_ids)]

    def _tokens_prompt(self, prefix: Prefix) -> OmniTokensPrompt:
        return OmniTokensPrompt(
            prompt_token_ids=[self._ids.codec_mask] * prefix.prompt_length + [self._ids.codec_pad, self._ids.codec_bos],
            prompt_embeds=PromptEmbedsPayload.from_tensor(self._rows(prefix)),
            additional_information=AdditionalInformationPayload.from_mapping(
                {"positions": talker_positions(prefix.positions), "pad_row": self._embeddings.pad}
            ),
        )

    def _rows(self, prefix: Prefix) -> torch.Tensor:
        p, dtype = prefix.prompt_length, prefix.rows.dtype
        start = self._embeddings.voices[self._voice][None].to(dtype)
        end = [self._embeddings.eos[None].to(dtype)] if prefix.ended else []
        return torch.cat([prefix.rows[:p], start, prefix.rows[p:], *end])


def talker_positions(positions: torch.Tensor) -> torch.Tensor:
    """The thinker's M-RoPE positions `[3, P]` with two text positions after them, `[3, P + 2]`."""
    # Not after the largest: frames that outlast their sound are at later positions than the text behind them.
    following = int(positions[:, -1].max()) + 1 + torch.arange(2)
    return torch.cat([positions, following.expand(3, 2)], dim=1)
