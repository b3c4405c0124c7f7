"""What request bodies are checked by, and the sentence for what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.sampling import BOUNDS, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, TOKEN_ID, Bounds

_SHOWN_CHARS = 60


class Wire(BaseModel):
    """What a body and its parts are checked by: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


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


class StageSampling(Wire):
    """How one stage is to sample, in vLLM's names; None leaves a value to the stage configuration."""

    model_config = ConfigDict(extra="forbid")

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
    if kind == "extra_forbidden":
        options = "mm_processor_kwargs" in fault["loc"]
        known = "use_audio_in_video" if options else ", ".join(StageSampling.model_fields)
        what = "option of the processor" if options else "sampling parameter"
        return BadRequest(f"{name} is no {what}; use {known}.", param=param, code="unsupported_parameter")
    wish = message.removeprefix("Input ").removeprefix("String ").removeprefix("List ").split(" after validation")[0]
    return BadRequest(f"{name} is {shown(value)}, but it {wish}.", param=param, code="invalid_value")


def _path(loc: Sequence[int | str]) -> str | None:
    keys = [key for key in loc if not (isinstance(key, str) and key.startswith("#"))]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return path.removeprefix(".") or None


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda _: "...")
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


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
