"""What request bodies are checked by, and the sentence for what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.sampling import BOUNDS, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, TOKEN_ID, Bounds

_SHOWN_CHARS = 60


def _fail_fast(schema: Any) -> None:
    """Every list in it: a fault takes a kilobyte, and a client sends millions of them."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)


class Wire(BaseModel):
    """What a body and its parts are checked by: strict types, unknown fields ignored, lists until their first fault."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class KnownKeys(Wire):
    """Without unknown fields, of which the first is told."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: object) -> object:
        if isinstance(value, dict):
            unknown = next((key for key in value if key not in cls.model_fields), None)
            if unknown is not None:
                raise PydanticCustomError("unknown_key", "is unknown", {"key": unknown})
        return value


def at_most(count: int) -> Any:
    """Of a list's entries or a string's characters."""
    return Field(max_length=count)


@dataclass(frozen=True)
class FewKeys:
    """An object of at most `count` keys, counted before one of them is looked at."""

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if isinstance(value, dict) and len(value) > self.count:
            raise PydanticCustomError("too_long", "", {"max_length": self.count})
        return value


_NOTHING: tuple[Any, ...] = (None, False, [], {}, 0, "none", "auto")
"""How clients say that they do not want an option."""


def unsupported(value: object) -> object:
    if value in _NOTHING:
        return None
    raise PydanticCustomError("unsupported", "is not supported; leave it out")


def not_blank(value: Any) -> Any:
    if not value:
        raise PydanticCustomError("blank", "should not be empty")
    return value


def _few(stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("few", f"should have at most {MAX_STOPS} strings")
    return stops


Unsupported = Annotated[Any, AfterValidator(unsupported), WithJsonSchema({"enum": list(_NOTHING)})]
Text = Annotated[str, AfterValidator(not_blank), Field(json_schema_extra={"minLength": 1})]
# For OpenAPI alone: the validators' sentences are ours.
SOME = Field(json_schema_extra={"minItems": 1})
_FEW = Field(json_schema_extra={"maxItems": MAX_STOPS})


def within(bounds: Bounds) -> Any:
    """A field that may be left out, within its bounds."""
    if bounds.above:
        return Field(default=None, gt=bounds.least, le=bounds.most)
    return Field(default=None, ge=bounds.least, le=bounds.most)


def string_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "#string"
    return "#list" if isinstance(value, list) else None


_StopText = Annotated[
    str, Field(max_length=MAX_STOP_CHARS), AfterValidator(not_blank), Field(json_schema_extra={"minLength": 1})
]
Stop = Annotated[
    Annotated[_StopText, Tag("#string")] | Annotated[list[_StopText], AfterValidator(_few), _FEW, Tag("#list")],
    Discriminator(
        string_or_list,
        custom_error_type="string_or_list",
        custom_error_message="should be a string or a list of strings",
    ),
]


class _VoiceId(Wire):
    id: str


def _name_or_id(value: object) -> str | None:
    if isinstance(value, str):
        return "#name"
    return "#id" if isinstance(value, dict) else None


NamedVoice = Annotated[
    Annotated[str, Tag("#name")] | Annotated[_VoiceId, Tag("#id")],
    Discriminator(
        _name_or_id, custom_error_type="name_or_id", custom_error_message="should be a name or {'id': <name>}"
    ),
]


def voice_name(voice: NamedVoice | None) -> str | None:
    return voice.id if isinstance(voice, _VoiceId) else voice


_TokenId = Annotated[int, Field(ge=TOKEN_ID.least, le=TOKEN_ID.most)]


class StageSampling(KnownKeys):
    """How one stage is to sample, in vLLM's names; None leaves a value to the stage configuration."""

    temperature: float | None = within(BOUNDS["temperature"])
    top_p: float | None = within(BOUNDS["top_p"])
    top_k: int | None = within(BOUNDS["top_k"])
    min_p: float | None = within(BOUNDS["min_p"])
    repetition_penalty: float | None = within(BOUNDS["repetition_penalty"])
    presence_penalty: float | None = within(BOUNDS["presence_penalty"])
    frequency_penalty: float | None = within(BOUNDS["frequency_penalty"])
    max_tokens: int | None = within(BOUNDS["max_tokens"])
    min_tokens: int | None = within(BOUNDS["min_tokens"])
    ignore_eos: bool | None = None
    seed: int | None = within(BOUNDS["seed"])
    stop: Stop | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None

    def given(self) -> dict[str, Any]:
        """The values that the client sent, as vLLM's sampling parameters."""
        return self.model_dump(exclude_none=True)


def refusal(fault: ErrorDetails) -> BadRequest:
    kind, message, value = fault["type"], fault["msg"], fault["input"]
    if kind == "json_invalid":
        return BadRequest("The request body is not valid JSON in UTF-8; send one JSON object.", code="invalid_json")
    param = _path(fault["loc"])
    if kind == "part_type":
        param, value = f"{param}.type", value.get("type") if isinstance(value, dict) else None
    name = param or "The request body"
    if kind == "missing":
        return BadRequest(f"{name} is required.", param=param, code="missing_required_parameter")
    if kind == "unsupported":
        return BadRequest(f"{name} {message}.", param=param, code="unsupported_parameter")
    if kind == "unknown_key":
        name = param = f"{name}.{_key(fault['ctx']['key'])}"
        options = "mm_processor_kwargs" in fault["loc"]
        known = "use_audio_in_video" if options else ", ".join(StageSampling.model_fields)
        what = "option of the processor" if options else "sampling parameter"
        return BadRequest(f"{name} is no {what}; use {known}.", param=param, code="unsupported_parameter")
    wish = _wish(fault).removeprefix("Input ").removeprefix("String ")
    return BadRequest(f"{name} is {shown(value)}, but it {wish}.", param=param, code="invalid_value")


_AS_OF_JSON = {
    "list_type": "should be a valid array",
    "dict_type": "should be an object",
    "model_type": "should be an object",
}
"""What pydantic says in Python's words where a validator of ours came before it."""


def _wish(fault: ErrorDetails) -> str:
    if fault["type"] == "too_long":
        return f"should have at most {fault['ctx']['max_length']} entries"
    return _AS_OF_JSON.get(fault["type"], fault["msg"])


def _path(loc: Sequence[int | str]) -> str | None:
    keys = [key for key in loc if not (isinstance(key, str) and key.startswith("#"))]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{_key(key)}" for key in keys)
    return path.removeprefix(".") or None


def shown(value: object) -> str:
    """As JSON, its beginning: no more of it is looked at."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _SHOWN_CHARS:
            return text[:_SHOWN_CHARS] + "..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """What `json.dumps` writes, bit by bit; of a long string the beginning."""
    if isinstance(value, dict):
        for index, (key, each) in enumerate(value.items()):
            yield from (", " if index else "{", _dumped(key), ": ")
            yield from _pieces(each)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield ", " if index else "["
            yield from _pieces(each)
        yield "]" if value else "[]"
    else:
        yield _dumped(value)


def _key(name: str) -> str:
    """A client's key in a path: its beginning, line ends escaped."""
    return _dumped(name)[1:-1][:_SHOWN_CHARS]


def _dumped(value: object) -> str:
    short = value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value
    return json.dumps(short, ensure_ascii=False, default=lambda _: "...")


def check_model(model: str, models: Collection[str]) -> None:
    if model not in models:
        raise BadRequest(
            f"The model {shown(model)} does not exist; use one of {', '.join(sorted(models))}.",
            param="model",
            code="model_not_found",
            status=404,
        )


def check_voice(voice: str | None, voices: Collection[str], param: str) -> None:
    """Raises BadRequest for a voice that the model lacks; None is the default one."""
    if voice is not None and voice not in voices:
        raise BadRequest(
            f"{param} is {shown(voice)}, but the voices are {', '.join(sorted(voices))}.",
            param=param,
            code="invalid_value",
        )
