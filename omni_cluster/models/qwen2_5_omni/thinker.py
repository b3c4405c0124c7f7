"""The thinker's input: the conversation with its media; its output rows go to the talker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni_cluster.inputs import Media, OmniRequest
from omni_cluster.models.family import EngineInput, LaterRows

SAMPLE_RATE_HZ = 16_000


class ThinkerSession:
    """One request in the thinker."""

    def __init__(self, request: OmniRequest) -> None:
        self._request = request

    async def prompt(self) -> EngineInput:
        prompt: dict[str, Any] = {"prompt": self._request.prompt}
        media = multi_modal_data(self._request.media)
        if media:
            prompt["multi_modal_data"] = media
        # Positions that the prefix cache answers are not computed, so they would have no rows.
        sampling = {"skip_reading_prefix_cache": True} if self._request.wants_audio else {}
        return EngineInput(prompt, sampling, emit_rows=self._request.wants_audio)

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        return
        yield


def multi_modal_data(media: Media) -> dict[str, Any]:
    """Media by vLLM's names for them."""
    data: dict[str, Any] = {}
    if media.audios:
        data["audio"] = [(audio, SAMPLE_RATE_HZ) for audio in media.audios]
    if media.images:
        data["image"] = list(media.images)
    return data
