"""The answers of `POST /v1/chat/completions`, whole and as the chunks of a stream."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omni_cluster.openai_api.chat import ChatRequest, FinishReason
from omni_cluster.outputs import TokenChoice, TokenLogprob

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON has no word for."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `completion_tokens` are those of the text, `audio_tokens` the codec tokens spoken."""

    prompt_tokens: int
    completion_tokens: int
    audio_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {"audio_tokens": self.audio_tokens},
        }


def new_answer_id() -> str:
    """A fresh id of one answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"


class ChatStream:
    """The chunks of one streamed answer, in the order: start, text and audio, finish, usage.

    Text is in `delta.content` and, when audio is wanted, also in `delta.audio.transcript`. Nothing of an answer is kept
    after it was sent, so its audio expires at the moment it was created. `modality` beside `choices` is by what
    vLLM-Omni's clients, its benchmark among them, tell text from audio.
    """

    def __init__(self, request: ChatRequest, *, answer_id: str | None = None, created: int | None = None) -> None:
        self.id = answer_id or new_answer_id()
        self.created = int(time.time()) if created is None else created
        self._request = request

    def start(self) -> dict[str, Any]:
        """The first chunk, which names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str, choices: Sequence[TokenChoice] = ()) -> dict[str, Any]:
        """A piece of the text, and its tokens' logprobs where the client asked for them."""
        delta: dict[str, Any] = {"content": text}
        if self._request.wants_audio:
            delta["audio"] = {"id": _audio_id(self.id), "transcript": text}
        return self._chunk(delta, logprobs=logprobs(self._request, choices)) | {"modality": "text"}

    def audio(self, data: bytes) -> dict[str, Any]:
        """A piece of audio in the encoding of the request; cut raw PCM with `Base64Pieces` first."""
        delta = {"audio": {"id": _audio_id(self.id), "data": base64.b64encode(data).decode("ascii")}}
        return self._chunk(delta) | {"modality": "audio"}

    def finish(self, reason: FinishReason) -> dict[str, Any]:
        """The chunk that says why the answer ends."""
        delta: dict[str, Any] = {}
        if self._request.wants_audio:
            delta["audio"] = {"id": _audio_id(self.id), "expires_at": self.created}
        return self._chunk(delta, reason)

    def usage(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, without choices; None when the client did not ask for it."""
        return self._head() | {"choices": [], "usage": usage.body()} if self._request.include_usage else None

    def _chunk(
        self, delta: dict[str, Any], reason: FinishReason | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head() | {"choices": [choice]}
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _head(self) -> dict[str, Any]:
        return _head(self.id, "chat.completion.chunk", self.created, self._request.model)


def completion(
    request: ChatRequest,
    *,
    text: str,
    audio: bytes | None,
    finish_reason: FinishReason,
    usage: Usage,
    choices: Sequence[TokenChoice] = (),
    answer_id: str | None = None,
    created: int | None = None,
) -> dict[str, Any]:
    """The body of an answer that is not streamed; `audio` is encoded as the request asked, None without audio.

    Unlike OpenAI's, `message.content` holds the text beside audio too, because clients of vLLM and DashScope read it
    there; the same text is the audio's transcript.
    """
    answer_id = answer_id or new_answer_id()
    created = int(time.time()) if created is None else created
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if audio is not None:
        data = base64.b64encode(audio).decode("ascii")
        message["audio"] = {"id": _audio_id(answer_id), "data": data, "expires_at": created, "transcript": text}
    choice = {"index": 0, "message": message, "logprobs": logprobs(request, choices), "finish_reason": finish_reason}
    return _head(answer_id, "chat.completion", created, request.model) | {"choices": [choice], "usage": usage.body()}


def logprobs(request: ChatRequest, choices: Sequence[TokenChoice]) -> dict[str, Any] | None:
    """OpenAI's logprobs object; None for a client that asked for none."""
    most = request.sampling.logprobs
    if most is None:
        return None
    content = [
        _logprob(choice.sampled) | {"top_logprobs": [_logprob(one) for one in choice.likeliest[:most]]}
        for choice in choices
    ]
    return {"content": content, "refusal": None}


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.token,
        "logprob": max(one.logprob, _LEAST_LOGPROB),
        "bytes": list(one.utf8),
    }


def _head(answer_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def _audio_id(answer_id: str) -> str:
    return f"audio-{answer_id.removeprefix('chatcmpl-')}"
