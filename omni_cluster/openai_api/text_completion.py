"""`POST /v1/completions`: the request as it is accepted, and its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.bodies import parsed
from omni_cluster.openai_api.chat import FinishReason
from omni_cluster.openai_api.completion import Usage, token_logprob
from omni_cluster.openai_api.errors import check_at_most, invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.wire import ANY_SEED, Sampling, Wire, named_model, within
from omni_cluster.types.outputs import TokenChoice
from omni_cluster.types.sampling import BOUNDS, TOKEN_ID

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
MAX_CHOICES = 64
"""Of one request: prompts, times the answers to each."""
RawPrompt = str | tuple[int, ...]
"""A text, or its tokens."""


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request. Each of `prompts` is gone on with `n` times, by `sampling` of vLLM's names.

    `logprobs`: how many of the likeliest tokens to tell beside each sampled one's; None tells nothing of any. `seed` is
    in `sampling` too.
    """

    model: str
    prompts: tuple[RawPrompt, ...]
    n: int
    echo: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    sampling: dict[str, Any]
    seed: int | None


def _prompts(value: object) -> tuple[RawPrompt, ...]:
    """One of four shapes, as prompts."""
    if isinstance(value, str):
        return (_not_empty(value),)
    if isinstance(value, list) and value:
        if all(map(TOKEN_ID.hold, value)):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise PydanticCustomError("few_prompts", f"should be at most {MAX_CHOICES} prompts")
        if all(isinstance(each, str) for each in value):
            return tuple(map(_not_empty, value))
        if all(isinstance(each, list) and all(map(TOKEN_ID.hold, each)) for each in value):
            return tuple(tuple(_not_empty(each)) for each in value)
    raise PydanticCustomError(
        "prompts",
        "should be a string, a list of strings, a list of token ids or a list of such lists, none of them empty",
    )


def _not_empty(prompt: Any) -> Any:
    if not prompt:
        raise PydanticCustomError("empty_prompt", "should not be empty")
    return prompt


_IDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_ID.most},
}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        *({"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": i} for i in (_TEXT, _IDS)),
    ]
}


class _StreamOptions(Wire):
    others = Others(ignored=frozenset({"include_obfuscation"}))

    include_usage: bool | None = None


_HABITS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "session_id", "watermarking"),
        "add_special_tokens",  # of Qwen's tokenizers, which add none
    }
)
_IDLE = {**ANY_SEED, "length_penalty": (1,), "truncate_prompt_tokens": (-1,)}
_AS_MANY_AS_FIT = -1
"""Of `max_tokens`; left out, it is OpenAI's default."""
_OF_CHAT = "use /v1/chat/completions"
_INSTEAD = {
    "suffix": "a text is gone on with at its end alone; leave it out",
    "prompt_logprobs": "those of a prompt are not returned; leave it out",
    "max_completion_tokens": "use max_tokens",
    **dict.fromkeys(("messages", "tools", "modalities", "audio", "response_format", "structured_outputs"), _OF_CHAT),
}


def _some_or_as_many_as_fit(value: int | None) -> int | None:
    if value is None or value >= 1 or value == _AS_MANY_AS_FIT:
        return value
    raise PydanticCustomError("some", "should be greater than or equal to 1, or -1 for as many as fit")


class CompletionBody(Sampling):
    """The request body."""

    others = Others(_HABITS, _IDLE, _INSTEAD)

    model: str | None = None
    max_tokens: Annotated[
        int | None,
        AfterValidator(_some_or_as_many_as_fit),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": _AS_MANY_AS_FIT}]}),
    ] = None
    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(_PROMPT)]
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = within(BOUNDS["logprobs"])
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


def parse_completion(body: bytes | bytearray, *, models: Collection[str], limits: ApiLimits) -> CompletionRequest:
    """Raises BadRequest with one sentence and the field's path."""
    wire = parsed(CompletionBody, body, limits.max_marks)
    model = named_model(wire.model, models)
    _check_choices(wire)
    _check_stream_and_echo(wire)
    return CompletionRequest(
        model=model,
        prompts=wire.prompt,
        n=wire.n or 1,
        echo=bool(wire.echo),
        logprobs=wire.logprobs,
        stream=bool(wire.stream),
        include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        sampling=_sampling(wire, limits),
        seed=wire.seed,
    )


def _check_choices(wire: CompletionBody) -> None:
    n = wire.n or 1
    if wire.best_of not in (None, n):
        raise invalid("best_of", f"best_of is {wire.best_of}, but it should be n, which is {n}: all answers are given.")
    if (choices := n * len(wire.prompt)) > MAX_CHOICES:
        raise invalid("n", f"n is {n} for each of {len(wire.prompt)} prompts, but at most {MAX_CHOICES} of {choices} "
                        "answers are given.")  # fmt: skip


def _check_stream_and_echo(wire: CompletionBody) -> None:
    if wire.stream_options and not wire.stream:
        raise invalid("stream_options", "stream_options is only for streams; leave it out or set stream to true.")
    if wire.echo and wire.logprobs is not None:
        raise invalid("logprobs", "logprobs of a prompt, which echo asks for, are not returned; leave one of them out.")


def _sampling(wire: CompletionBody, limits: ApiLimits) -> dict[str, Any]:
    logprobs = {} if wire.logprobs is None else {"logprobs": wire.logprobs}
    asked = wire.given() | logprobs
    if asked.setdefault("max_tokens", min(DEFAULT_MAX_TOKENS, limits.max_output_tokens)) == _AS_MANY_AS_FIT:
        del asked["max_tokens"]
    check_at_most("max_tokens", wire.max_tokens, limits.max_output_tokens)
    return asked


class TextStream:
    """The bodies of one answer, whole or as the chunks of a stream: each names the choice that it is of."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": list(choices), "usage": usage.body()}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice], **({"usage": None} if self._request.include_usage else {})}

    def usage(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, without choices; None when the client did not ask for it."""
        return {**self._head, "choices": [], "usage": usage.body()} if self._request.include_usage else None


class ChoiceText:
    """One choice, piece by piece. `place`: characters of it that were sent."""

    def __init__(self, index: int, most: int | None) -> None:
        self._index = index
        self._most = most
        self._place = 0

    def said(
        self, text: str, tokens: Sequence[TokenChoice] = (), finish_reason: FinishReason | None = None
    ) -> dict[str, Any]:
        """`tokens`: of `text`, where the client asked for their logprobs."""
        logprobs = None if self._most is None else self._logprobs(tokens, self._most)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[TokenChoice], most: int) -> dict[str, Any]:
        """In the shape of this endpoint, the sampled token among the likeliest."""
        offsets = []
        for each in tokens:
            offsets.append(self._place)
            self._place += len(each.sampled.token)
        sampled = [token_logprob(each.sampled) for each in tokens]
        top = [map(token_logprob, (*each.likeliest[:most], each.sampled)) for each in tokens]
        return {
            "tokens": [one["token"] for one in sampled],
            "token_logprobs": [one["logprob"] for one in sampled],
            "top_logprobs": [{one["token"]: one["logprob"] for one in ones} for ones in top],
            "text_offset": offsets,
        }
