"""Code2wav's input: the talker's codes, as one job of all of them or piece by piece while the talker makes more."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omni_cluster.models.code_reader import CodeReader
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

SAMPLE_RATE_HZ = 24_000
"""Of the vocoder; no checkpoint says it."""

FIRST_BLOCKS = (1, 1, 1, 2, 4)
"""Blocks of a stream's first pieces, at least: the first sound comes early, and each is made in less time than the ones
before it sound. Their codes come no faster than the text, which prompts of others slow, so the third is small too
(benchmarks/notes/2026-11-27-third-piece.md). At most twice as many: on a busy card a piece grows while it waits, and so
does the time that the client can wait for the next one. Those that follow have `LATER_BLOCKS` at least, which are worth
their look-ahead, and more when more codes wait."""
LATER_BLOCKS = 8

REPLAYED_BLOCKS = 4
"""Of a request that is begun again, so many blocks are made again before the one in which the client's sound ends. What
a block leaves in those behind it fades by some 40 dB with each (benchmarks/notes/2026-11-25-chaos.md)."""

DIT_DEFAULTS = {"repeats": 2, "block_size": 24}
VOCODER_DEFAULTS = {"upsample_rates": (5, 3, 2, 2, 2, 2)}
"""Those of transformers' classes, which a checkpoint may leave out."""


@dataclass(frozen=True, slots=True)
class CodeBlocks:
    """How codes lie in the DiT's mel, `frames_per_code`, and `codes_per_block` in one of its attention blocks; and how
    the vocoder makes sound of it, `samples_per_frame`.
    """

    frames_per_code: int
    codes_per_block: int
    samples_per_frame: int

    @property
    def samples_per_code(self) -> int:
        return self.frames_per_code * self.samples_per_frame

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CodeBlocks:
        """Without transformers, which the ingress does not load."""
        token2wav = config["token2wav_config"]
        dit = {**DIT_DEFAULTS, **token2wav.get("dit_config", {})}
        vocoder = {**VOCODER_DEFAULTS, **token2wav.get("bigvgan_config", {})}
        return cls(dit["repeats"], dit["block_size"] // dit["repeats"], math.prod(vocoder["upsample_rates"]))


class Code2WavSession:
    """One request in code2wav.

    Whole mode is one job of all codes, which is what the reference computes. Streaming, a piece is whole blocks and,
    as look-ahead, the block after them or its first codes; the last piece is what remains. A request that is begun
    again starts `REPLAYED_BLOCKS` before the block in which the client's sound ends, in pieces as large as they may be;
    then it is a stream that begins.
    """

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk],
        ids: SpecialIds,
        blocks: CodeBlocks,
        voice: str,
        max_piece_blocks: int,
        look_ahead_codes: int | None = None,
    ) -> None:
        """`max_piece_blocks` >= 2: else a remainder of more than one block could not be split into whole blocks.

        `look_ahead_codes`: a block's at most, which is what None means.
        """
        self._request = request
        self._codes = CodeReader(upstream, ids.num_codes)
        self._blocks = blocks
        self._voice = voice
        self._max_piece_blocks = max_piece_blocks
        self._look_ahead = min(look_ahead_codes or blocks.codes_per_block, blocks.codes_per_block)
        self._delivered = request.known_of("code2wav").num_samples
        replayed_from = max(0, self._delivered_blocks - REPLAYED_BLOCKS) * blocks.codes_per_block
        self._start = replayed_from if request.streams_audio else 0
        self._taken = self._most_blocks = 0

    async def jobs(self) -> AsyncGenerator[SoundJob, None]:
        """See `SoundSession.jobs`; raises what the upstream raised. Closing it ends the reading of the upstream."""
        async with self._codes.reading():
            if not self._request.streams_audio:
                await self._codes.wait_for_all()
                if len(self._codes):
                    yield self.latest()
                return
            for min_blocks, max_blocks in self._piece_ranges():
                self._most_blocks = max_blocks
                await self._codes.wait_for(self._start + min_blocks * self._blocks.codes_per_block + self._look_ahead)
                if len(self._codes) <= self._start:
                    return
                yield self.latest()
                self._start += self._taken

    def _piece_ranges(self) -> Iterator[tuple[int, int]]:
        """Blocks of the next piece, at least and at most; asked when the one before it has its size."""
        while (left := self._delivered_blocks - self._start // self._blocks.codes_per_block) > 0:
            yield (min(left, self._max_piece_blocks),) * 2
        for number in itertools.count():
            yield piece_range(number, self._max_piece_blocks)

    @property
    def _delivered_blocks(self) -> int:
        """Whole blocks of sound that the client has."""
        return self._delivered // (self._blocks.samples_per_code * self._blocks.codes_per_block)

    def latest(self) -> SoundJob:
        """See `SoundSession.latest`."""
        if not self._request.streams_audio:
            return self._job(len(self._codes))
        self._taken, look_ahead = self._piece_size(len(self._codes) - self._start, self._most_blocks)
        return self._job(self._start + self._taken, look_ahead, stream=self._request.request_id)

    def _job(self, end: int, look_ahead: int = 0, stream: str | None = None) -> SoundJob:
        """The sound of the codes before `end` that no piece has had."""
        codes = self._codes.between(self._start, end + look_ahead)
        per_code = self._blocks.samples_per_code
        return SoundJob(
            codes,
            range(self._start * per_code, end * per_code),
            size=len(codes) * self._blocks.frames_per_code,
            voice=self._voice,
            seed=self._request.seed,
            stream=stream,
            look_ahead=look_ahead,
            is_heard=stream is None or end * per_code > self._delivered,
        )

    def _piece_size(self, waiting: int, max_blocks: int) -> tuple[int, int]:
        """Codes of the next piece, and of its look-ahead, when `waiting` are there that no piece has had."""
        block, most = self._blocks.codes_per_block, max_blocks * self._blocks.codes_per_block
        too_few = block + self._look_ahead - 1  # less than a block and its look-ahead
        if self._codes.complete and waiting <= max(most, too_few):
            return waiting, 0
        return min((waiting - self._look_ahead) // block * block, most), self._look_ahead


def piece_range(number: int, max_piece_blocks: int) -> tuple[int, int]:
    """Blocks of a stream's piece, at least and at most."""
    if number < len(FIRST_BLOCKS):
        blocks = min(FIRST_BLOCKS[number], max_piece_blocks)
        return blocks, min(2 * blocks, max_piece_blocks)
    return min(LATER_BLOCKS, max_piece_blocks), max_piece_blocks
