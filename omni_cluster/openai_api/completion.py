"""The answers of `POST /v1/chat/completions`, whole and as the chunks of a stream."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omni_cluster.openai_api.chat import ChatRequest, FinishReason
from omni_cluster.types.outputs import Call, CallDelta, TokenChoice, TokenLogprob

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON has no word for."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `audio_tokens`, codec tokens spoken, are among `completion_tokens`; of the prompt's,
    `cached_tokens` were read from the prefix cache, and `prompt_audio_tokens` are sound.
    """

    prompt_tokens: int
    completion_tokens: int
    audio_tokens: int = 0
    cached_tokens: int = 0
    prompt_audio_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object: details are parts of what they are details of."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": self.prompt_audio_tokens},
            "completion_tokens_details": {
                "text_tokens": self.completion_tokens - self.audio_tokens,
                "audio_tokens": self.audio_tokens,
                "reasoning_tokens": 0,
            },
        }


def sum_of(choices: Sequence[Usage]) -> Usage:
    """Of the choices of one request, which have one prompt."""
    return replace(
        choices[0],
        completion_tokens=sum(each.completion_tokens for each in choices),
        audio_tokens=sum(each.audio_tokens for each in choices),
    )


def new_answer_id() -> str:
    """A fresh id of one answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"


class ChatStream:
    """The chunks of one choice of a streamed answer, in the order: start; text, audio and pictures; finish, usage.

    Text is in `delta.content` and, when audio is wanted, also in `delta.audio.transcript`. Nothing of an answer is kept
    after it was sent, so its audio expires at the moment it was created. The audio's id and voice come once, with
    the first of it: clients join what comes. `modality` beside `choices` is by what vLLM-Omni's clients, its benchmark
    among them, tell text from audio and from pictures, which are in `delta.content` too.
    `voice`: in which the answer is spoken. `used`: the tokens so far, for a client that wants them in every chunk.
    """

    def __init__(
        self,
        request: ChatRequest,
        *,
        answer_id: str | None = None,
        created: int | None = None,
        index: int = 0,
        voice: str | None = None,
        used: Callable[[], Usage] | None = None,
    ) -> None:
        self.id = answer_id or new_answer_id()
        self.created = int(time.time()) if created is None else created
        self._request = request
        self._index = index
        self._used = used if request.usage_in_chunks else None
        self._first_of_audio = {"id": _audio_id(self.id, index)} | _of_voice(voice)

    def start(self) -> dict[str, Any]:
        """The first chunk, which names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str, choices: Sequence[TokenChoice] = ()) -> dict[str, Any]:
        """A piece of the text, and its tokens' logprobs where the client asked for them."""
        delta: dict[str, Any] = {"content": text}
        if self._request.wants_audio:
            delta["audio"] = self._of_audio(transcript=text)
        return self._chunk(delta, logprobs=logprobs(self._request, choices)) | {"modality": "text"}

    def audio(self, data: bytes) -> dict[str, Any]:
        """A piece of audio in the encoding of the request; cut raw PCM with `Base64Pieces` first."""
        delta = {"audio": self._of_audio(data=base64.b64encode(data).decode("ascii"))}
        return self._chunk(delta) | {"modality": "audio"}

    def image(self, png: bytes) -> dict[str, Any]:
        """A picture: a list of one part, as vLLM-Omni sends it, in place of a string."""
        return self._chunk({"content": [_image_part(png)]}) | {"modality": "image"}

    def calls(self, deltas: Sequence[CallDelta]) -> dict[str, Any]:
        """Pieces of calls: of each call first its id and name, then its arguments."""
        return self._chunk({"tool_calls": [_call_piece(delta) for delta in deltas]}) | {"modality": "text"}

    def finish(self, reason: FinishReason) -> dict[str, Any]:
        """The chunk that says why the answer ends."""
        delta: dict[str, Any] = {}
        if self._request.wants_audio:
            delta["audio"] = self._of_audio(expires_at=self.created)
        return self._chunk(delta, reason)

    def usage(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, without choices; None when the client did not ask for it."""
        return self._head() | {"choices": [], "usage": usage.body()} if self._request.include_usage else None

    def _of_audio(self, **piece: str | int) -> dict[str, Any]:
        first, self._first_of_audio = self._first_of_audio, {}
        return first | piece

    def _chunk(
        self, delta: dict[str, Any], reason: FinishReason | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head() | {"choices": [choice]}
        if self._used is not None:
            return chunk | {"usage": self._used().body()}
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _head(self) -> dict[str, Any]:
        return _head(self.id, "chat.completion.chunk", self.created, self._request.model)


@dataclass(frozen=True, eq=False)
class Spoken:
    """One choice of an answer that is not streamed.

    `audio`: encoded as the request asked, None without audio. `images`: PNG files.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    audio: bytes | None = None
    choices: Sequence[TokenChoice] = ()
    calls: Sequence[Call] = ()
    images: Sequence[bytes] = ()


def completion(
    request: ChatRequest,
    answers: Sequence[Spoken],
    *,
    voice: str | None = None,
    answer_id: str | None = None,
    created: int | None = None,
) -> dict[str, Any]:
    """The body of an answer that is not streamed, a choice for each of `answers`.

    Unlike OpenAI's, `message.content` holds the text beside audio too, because clients of vLLM and DashScope read it
    there; the same text is the audio's transcript. Where pictures were asked for it is a list of parts, the text first.
    """
    answer_id = answer_id or new_answer_id()
    created = int(time.time()) if created is None else created
    choices = [_choice(request, spoken, i, answer_id, created, voice) for i, spoken in enumerate(answers)]
    usage = sum_of([spoken.usage for spoken in answers])
    return _head(answer_id, "chat.completion", created, request.model) | {"choices": choices, "usage": usage.body()}


def _choice(
    request: ChatRequest, spoken: Spoken, index: int, answer_id: str, created: int, voice: str | None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(request, spoken), "refusal": None}
    if spoken.calls:
        message["tool_calls"] = [_call(call) for call in spoken.calls]
    if spoken.audio is not None:
        data = base64.b64encode(spoken.audio).decode("ascii")
        audio = {"id": _audio_id(answer_id, index), "data": data, "expires_at": created, "transcript": spoken.text}
        message["audio"] = audio | _of_voice(voice)
    said = logprobs(request, spoken.choices)
    return {"index": index, "message": message, "logprobs": said, "finish_reason": spoken.finish_reason}


def _content(request: ChatRequest, spoken: Spoken) -> str | list[dict[str, Any]] | None:
    if request.wants_images:
        return [{"type": "text", "text": spoken.text}, *map(_image_part, spoken.images)]
    return None if spoken.calls and not spoken.text else spoken.text


def _image_part(png: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"}}


def _of_voice(voice: str | None) -> dict[str, str]:
    return {} if voice is None else {"voice": voice}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(delta: CallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_call(Call(delta.id, delta.name or "", delta.arguments))}


def logprobs(request: ChatRequest, choices: Sequence[TokenChoice]) -> dict[str, Any] | None:
    """OpenAI's logprobs object; None for a client that asked for none."""
    most = request.sampling.get("logprobs")
    if most is None:
        return None
    content = [
        token_logprob(choice.sampled) | {"top_logprobs": [token_logprob(one) for one in choice.likeliest[:most]]}
        for choice in choices
    ]
    return {"content": content, "refusal": None}


def token_logprob(one: TokenLogprob) -> dict[str, Any]:
    """OpenAI's object of one token."""
    return {
        "token": one.token,
        "logprob": max(one.logprob, _LEAST_LOGPROB),
        "bytes": list(one.utf8),
    }


def _head(answer_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def _audio_id(answer_id: str, index: int) -> str:
    """Each choice has a sound of its own."""
    return f"audio-{answer_id.removeprefix('chatcmpl-')}" + (f"-{index}" if index else "")
