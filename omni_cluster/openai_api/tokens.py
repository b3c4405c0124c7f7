"""`POST /tokenize` and `/detokenize`, in vLLM's shapes: the requests as they are accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.bodies import parsed
from omni_cluster.openai_api.chat import MAX_MESSAGES, MAX_TOOLS
from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import Message, MessageReader, TemplateMessage, check_messages, has_media
from omni_cluster.openai_api.tools import Tool, template_tools
from omni_cluster.openai_api.wire import SOME, Wire, at_most, named_model, not_blank
from omni_cluster.types.sampling import TOKEN_ID


@dataclass(frozen=True)
class TokenizeRequest:
    """A checked request: a `prompt` as it is, or `messages` and `tools` for the chat template."""

    prompt: str | None
    messages: tuple[TemplateMessage, ...]
    tools: tuple[dict[str, Any], ...]
    wants_strings: bool


def _with_generation_prompt(value: bool | None) -> bool | None:
    if value is not False:
        return value
    raise PydanticCustomError("always", "should be true: a chat's prompt always asks for a reply")


class TokenizeBody(Wire):
    """The body of `/tokenize`."""

    others = Others(frozenset({"add_special_tokens"}))  # of Qwen's tokenizers, which add none
    kept: ClassVar[Mapping[str, tuple[type, ...]]] = {"prompt": (str,)}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], AfterValidator(not_blank), SOME, at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Annotated[
        bool | None, AfterValidator(_with_generation_prompt), WithJsonSchema({"enum": [True, None]})
    ] = None


class DetokenizeBody(Wire):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=TOKEN_ID.least, le=TOKEN_ID.most)]]


def parse_tokenize(body: bytes | bytearray, *, models: Collection[str], limits: ApiLimits) -> TokenizeRequest:
    """Raises BadRequest with one sentence and the field's path."""
    wire = parsed(TokenizeBody, body, limits.max_marks)
    named_model(wire.model, models)
    if (wire.prompt is None) == (wire.messages is None):
        raise BadRequest(
            "The request should have prompt or messages, one of them.",
            param="prompt",
            code="missing_required_parameter",
        )
    messages = wire.messages or []
    check_messages(messages, wire.tools or (), limits, use_audio_in_video=False)
    if has_media(messages):
        raise invalid(
            "messages", "messages have media, of which only the engine knows how many tokens they are; send text alone."
        )
    reader = MessageReader(messages, limits, {})
    return TokenizeRequest(
        prompt=wire.prompt,
        messages=tuple(reader.read(index, message) for index, message in enumerate(messages)),
        tools=template_tools(wire.tools or ()),
        wants_strings=bool(wire.return_token_strs),
    )


def parse_detokenize(body: bytes | bytearray, *, models: Collection[str], limits: ApiLimits) -> list[int]:
    """The tokens. Raises BadRequest with one sentence and the field's path."""
    wire = parsed(DetokenizeBody, body, limits.max_marks)
    named_model(wire.model, models)
    return wire.tokens
