"""`POST /v1/responses`: the request as it is accepted, which is a chat by another name. Nothing of it is kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from omni_cluster.openai_api.bodies import check_size, parsed
from omni_cluster.openai_api.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    CheckedChat,
    check_translated,
    open_chat_request,
)
from omni_cluster.openai_api.errors import invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.paths import Paths
from omni_cluster.openai_api.response_input import Conversation, Item
from omni_cluster.openai_api.wire import (
    ANY,
    SOME,
    FewKeys,
    Sampling,
    Wire,
    at_most,
    by_json_type,
    not_blank,
    within,
)
from omni_cluster.types.sampling import BOUNDS

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
"""The three are OpenAI's."""
WITH_LOGPROBS = "message.output_text.logprobs"

_KEPT_NOWHERE = "no answer is kept: send the whole conversation as input"
_IS_SILENT = "no sound is given here: use /v1/chat/completions"
_RUNS_NO_TOOL = "should be 'function': the server runs no tools of its own"


class _FunctionTool(Wire):
    others = Others(idle={"allowed_callers": (["direct"],)})

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tag(value: object) -> str | None:
    return "#function" if isinstance(value, dict) and value.get("type") == "function" else None


# A union of one, for the sentence.
_Tool = Annotated[
    Annotated[_FunctionTool, Tag("#function")],
    Discriminator(_tag, custom_error_type="part_type", custom_error_message=_RUNS_NO_TOOL),
]


class _ChosenFunction(Wire):
    type: Literal["function"]
    name: str


def _mode_or_function(value: object) -> str | None:
    return "#mode" if isinstance(value, str) else _tag(value)


_ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("#mode")] | Annotated[_ChosenFunction, Tag("#function")],
    Discriminator(
        _mode_or_function,
        custom_error_type="mode_or_function",
        custom_error_message="should be 'auto', 'none', 'required' or {'type': 'function', 'name': <name>}",
    ),
]


class _TextOptions(Wire):
    others = Others(idle={"verbosity": ("medium",)})

    format: dict[str, Any] | None = None


class _StreamOptions(Wire):
    # Usage is always there, and OpenAI's padding of events never is.
    others = Others(ignored=frozenset({"include_usage", "include_obfuscation"}))


class _Reasoning(Wire):
    """Of a model that does not reason."""

    others = Others(idle={"effort": ("none",), "context": ("auto",), "mode": ("standard",)})


_Input = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[list[Item], AfterValidator(not_blank), SOME, at_most(MAX_MESSAGES), Tag("#list")],
    by_json_type("should be a string or a list of items"),
]
_Metadata = Annotated[
    dict[Annotated[str, at_most(MAX_METADATA_KEY_CHARS)], Annotated[str, at_most(MAX_METADATA_CHARS)]],
    FewKeys(MAX_METADATA),
]


# All but the first are of what no response has.
_Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ResponsesBody(Sampling):
    """The request body."""

    others = Others(
        ignored=frozenset(
            {
                *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
                *("safety_identifier", "service_tier", "store", "user"),
            }
        ),
        idle={
            **ANY,
            "max_output_tokens": (-1,),
            "modalities": (["text"],),
            "truncation": ("auto", "disabled"),
        },
        instead={
            "audio": _IS_SILENT,
            "background": "an answer is given at once: leave it out",
            "conversation": _KEPT_NOWHERE,
            "modalities": _IS_SILENT,
            "previous_response_id": _KEPT_NOWHERE,
            "prompt": "no prompts are kept: send its text as instructions or input",
        },
    )

    model: str | None = None
    input: _Input
    instructions: str | None = None
    max_output_tokens: int | None = within(BOUNDS["max_tokens"])
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    text: _TextOptions | None = None
    tools: Annotated[list[_Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: int | None = within(BOUNDS["logprobs"])
    include: list[_Included] | None = None
    reasoning: _Reasoning | None = None
    metadata: _Metadata | None = None


_SAME = ("model", "stream", "parallel_tool_calls", *Sampling.model_fields)
"""Fields that a chat has by the same name."""


@dataclass(frozen=True, eq=False)
class ResponsesRequest:
    """A checked request: the chat that it is, and what the response repeats of it."""

    chat: ChatRequest
    repeated: dict[str, Any]

    def without_media(self) -> ResponsesRequest:
        """For what lasts as long as the answer."""
        return ResponsesRequest(self.chat.without_media(), self.repeated)


@dataclass(frozen=True)
class CheckedResponses:
    """A body that is accepted as far as it can be without its media; `paths`: from those of the chat to its own."""

    chat: CheckedChat
    repeated: dict[str, Any]
    paths: Paths

    @property
    def has_media(self) -> bool:
        return self.chat.has_media

    @property
    def urls(self) -> tuple[MediaUrl, ...]:
        """What must be fetched for it, by the client's own paths."""
        return tuple(MediaUrl(self.paths.own(each.param), each.url) for each in self.chat.urls)


def check_responses_request(body: bytes | bytearray, *, models: Collection[str], limits: ApiLimits) -> CheckedResponses:
    """Checks all of a request body but what its media hold. Raises BadRequest with one sentence and the field's path.

    All that a chat has too is checked as a chat.
    """
    check_size(body, limits.max_body_bytes)
    wire = parsed(ResponsesBody, body, limits.max_marks)
    paths = Paths()
    conversation = _conversation(wire, paths)
    chat = _chat_body(wire, paths) | {"messages": conversation.messages}
    with paths.translated():
        checked = check_translated(chat, models=models, limits=limits)
    return CheckedResponses(checked, _repeated(wire, conversation.left_out), paths)


def open_responses_request(
    checked: CheckedResponses, fetched: Mapping[str, bytes], limits: ApiLimits
) -> ResponsesRequest:
    """Decodes the media, see `open_chat_request`. `fetched`: what each of `checked.urls` led to, by its param."""
    of_chat = {each.param: fetched[checked.paths.own(each.param)] for each in checked.chat.urls}
    with checked.paths.translated():
        chat = open_chat_request(checked.chat, of_chat, limits)
    if chat.structure is not None:
        chat = replace(chat, structure=replace(chat.structure, param=checked.paths.own(chat.structure.param)))
    return ResponsesRequest(chat, checked.repeated)


def _conversation(wire: ResponsesBody, paths: Paths) -> Conversation:
    paths.note("messages", "input")
    conversation = Conversation(paths)
    if wire.instructions is not None:
        conversation.say("system", wire.instructions, "instructions")
    if isinstance(wire.input, str):
        conversation.say("user", wire.input, "input")
    else:
        conversation.read(wire.input, "input")
    if not conversation.messages:
        raise invalid("input", "input has no message; send one.")
    return conversation


def _chat_body(wire: ResponsesBody, paths: Paths) -> dict[str, Any]:
    """All of the chat but its messages."""
    same = {name: value for name in _SAME if (value := getattr(wire, name)) is not None}
    chat = same | {"modalities": ["text"]} | _logprobs(wire, paths)
    if wire.max_output_tokens is not None:
        paths.note("max_completion_tokens", "max_output_tokens")
        chat["max_completion_tokens"] = wire.max_output_tokens
    if wire.tools:
        chat["tools"] = _tools(wire.tools, paths)
    if wire.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(wire.tool_choice, paths)
    if wire.text is not None and wire.text.format is not None:
        chat["response_format"] = _response_format(wire.text.format, paths)
    return chat


def _logprobs(wire: ResponsesBody, paths: Paths) -> dict[str, Any]:
    paths.note("logprobs", "include")
    if WITH_LOGPROBS not in (wire.include or ()) and not wire.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": wire.top_logprobs or 0}


def _tools(tools: Sequence[_FunctionTool], paths: Paths) -> list[dict[str, Any]]:
    for index in range(len(tools)):
        paths.note(f"tools[{index}].function", f"tools[{index}]")
    functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


def _tool_choice(choice: _ToolChoice, paths: Paths) -> str | dict[str, Any]:
    paths.note("tool_choice.function", "tool_choice")
    if isinstance(choice, _ChosenFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(form: Mapping[str, Any], paths: Paths) -> Mapping[str, Any]:
    """A chat has what describes a schema in an object of its own."""
    paths.note("response_format", "text.format")
    paths.note("response_format.json_schema", "text.format")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _repeated(wire: ResponsesBody, left_out: Sequence[str]) -> dict[str, Any]:
    choice, form = wire.tool_choice, wire.text.format if wire.text else None
    repeated = {
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "temperature": wire.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice.model_dump() if isinstance(choice, _ChosenFunction) else choice or "auto",
        "tools": [tool.model_dump() for tool in wire.tools or ()],
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": wire.top_p,
    }
    removed = [{"id": each, "type": "reasoning", "action": "removed", "reason": "model_mismatch"} for each in left_out]
    return repeated | ({"input_transformations": removed} if removed else {})
