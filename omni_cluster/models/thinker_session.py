"""A thinker's input: the conversation with its media; its conditioning rows go to the talker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from PIL import Image

from omni_cluster.models.family import EngineInput, GivenReply, LaterRows
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import NOTHING_KNOWN, Media, OmniRequest, Prompt

SAMPLE_RATE_HZ = 16_000
ONLY_ROWS = {"min_tokens": 0, "max_tokens": 1}
"""Sampling of a request whose tokens are all there: the one that vLLM samples behind them is dropped."""


Tokenize = Callable[[str, bool], list[int]]
"""Of a text, and whether marks such as <|im_end|> in it are the model's and not text."""


class ThinkerSession:
    """One request in the thinker. `only_of_media`: its reader takes rows of media alone, and the others' ids."""

    def __init__(self, request: OmniRequest, tokenize: Tokenize, *, only_of_media: bool = False) -> None:
        self._request = request
        self._tokenize = tokenize
        self._output = request.known_of("thinker")
        self._is_read = request.wants_audio and not request.known_of("talker").has_ended
        self._wants_rows = self._is_read and (not only_of_media or request.media != Media())
        self.known = self._output if request.reply is None else NOTHING_KNOWN  # a given reply is in the prompt

    async def prompt(self) -> EngineInput | None:
        """None when all is known, and no stage needs rows or the prompt's ids any more."""
        if self._output.has_ended and not self._is_read:
            return None
        if self._request.reply is not None:
            return self._given(self._request.reply)
        prompt = as_vllm_takes_it(self._request.prompt)
        media = multi_modal_data(self._request.media)
        if media:
            prompt["multi_modal_data"] = media
        return EngineInput(prompt, ONLY_ROWS if self.known.has_ended else {}, emit_rows=self._wants_rows)

    def _given(self, reply: str) -> EngineInput:
        """A given reply is computed as part of the prompt, for its rows."""
        reply_ids = tuple(self._tokenize(reply, False))
        token_ids = [*self._tokenize(str(self._request.prompt), True), *reply_ids]
        return EngineInput(
            {"prompt_token_ids": token_ids},
            ONLY_ROWS,
            emit_rows=self._wants_rows,
            given_reply=GivenReply(reply_ids, "" if self._output.token_ids else reply),
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        return
        yield


def as_vllm_takes_it(prompt: Prompt | str) -> dict[str, Any]:
    if isinstance(prompt, Prompt) and prompt.token_ids is not None:
        return {"prompt_token_ids": list(prompt.token_ids)}
    return {"prompt": str(prompt)}


def multi_modal_data(media: Media) -> dict[str, Any]:
    """Media by vLLM's names for them. RequestError for videos of which only some have audio, as transformers' flag."""
    data: dict[str, Any] = {}
    if media.audios:
        data["audio"] = [(audio, SAMPLE_RATE_HZ) for audio in media.audios]
    if media.images:
        data["image"] = [picture_of(image) for image in media.images]
    if media.videos:
        if len({video.audio is None for video in media.videos}) > 1:
            raise RequestError("some videos come with their audio and some without; use use_audio_in_video for all.")
        data["video"] = [video_item(video.frames, video.fps, video.audio) for video in media.videos]
    return data


def picture_of(image: Image.Image | np.ndarray) -> Image.Image:
    """A picture as vLLM takes it: it reads the sides of an array in another order."""
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def video_item(frames: np.ndarray, fps: float, audio: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
    """A video as the families' processors take it: what goes with the frames is vLLM's "metadata", hashed with them."""
    return frames, {"fps": fps, "audio": audio}
