"""Code2wav's input: the talker's codes. Whole mode: one job of all codes, which is what the reference computes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import DiffusionJob
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.outputs import StageChunk


class Code2WavSession:
    """One request in code2wav."""

    def __init__(
        self,
        request: OmniRequest,
        upstream: AsyncIterator[StageChunk],
        ids: SpecialIds,
        frames_per_code: int,
        voice: str,
    ) -> None:
        self._request = request
        self._upstream = upstream
        self._ids = ids
        self._frames_per_code = frames_per_code
        self._voice = voice

    async def jobs(self) -> AsyncIterator[DiffusionJob]:
        codes = await self._collect_codes()
        if codes:
            yield DiffusionJob(codes, self._voice, self._request.seed, len(codes) * self._frames_per_code)

    async def _collect_codes(self) -> tuple[int, ...]:
        codes: list[int] = []
        async for chunk in self._upstream:
            new = chunk.token_ids[max(0, len(codes) - chunk.token_start) :]  # a chunk that comes twice is dropped
            codes.extend(code for code in new if code not in self._ids.codec_stops)
        return tuple(codes)
