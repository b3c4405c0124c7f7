"""What request bodies are checked by, and the sentence for what is wrong with one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.fields import Others, is_nothing, kinds_of, nothings
from omni_cluster.types.sampling import (
    BOUNDS,
    CLIENT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    TOKEN_ID,
    Bounds,
)

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
    """What a body and its parts are checked by: strict types, no unknown fields, lists until their first fault.

    A field that may be left out may also hold what asks for nothing (`is_nothing`). `kept`: types whose empty value
    asks for something, by field. `others`: the fields that are known beside those that are read.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
    others: ClassVar[Others] = Others()
    kept: ClassVar[Mapping[str, tuple[type, ...]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema.setdefault("properties", {})
        for name in _kinds(cls).keys() & properties.keys():
            properties[name].pop("default", None)
            values = [value for value in nothings() if cls._asks_nothing(name, value)]
            values += cls.others.idle.get(name, ())
            properties[name] = {"anyOf": [properties[name], {"enum": values}]}
        others = cls.others.schema()
        properties.update({name: said for name, said in others.items() if name not in cls.model_fields})
        schema["additionalProperties"] = {"enum": nothings()}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, value: object) -> object:
        """Those that ask for something. The first of those that are not known is refused."""
        if not isinstance(value, dict):
            return value
        fields = _names(cls)
        unknown = next((name for name in value if name not in fields and cls.others.asks(name, value[name])), None)
        if unknown is not None:
            wish = cls.others.wish(unknown, fields)
            raise PydanticCustomError("unknown_key", "", {"key": unknown, "value": value[unknown], "wish": wish})
        return {name: each for name, each in value.items() if name in fields and not cls._asks_nothing(name, each)}

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        kinds = _kinds(cls).get(name)
        if kinds is None or type(value) in cls.kept.get(name, ()):
            return False
        return is_nothing(value, kinds) or cls.others.is_idle(name, value)


@cache
def _kinds(cls: type[Wire]) -> Mapping[str, frozenset[type]]:
    """The kinds of the fields that may be left out."""
    fields = cls.model_fields.items()
    return {field.alias or name: kinds_of(field.annotation) for name, field in fields if not field.is_required()}


@cache
def _names(cls: type[Wire]) -> tuple[str, ...]:
    """Of its fields, in their order, as clients write them."""
    return tuple(field.alias or name for name, field in cls.model_fields.items())


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


def not_blank(value: Any) -> Any:
    if not value:
        raise PydanticCustomError("blank", "should not be empty")
    return value


def _few(stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("few", f"should have at most {MAX_STOPS} strings")
    return stops


Text = Annotated[str, AfterValidator(not_blank), Field(json_schema_extra={"minLength": 1})]
# For OpenAPI alone: the validators' sentences are ours.
SOME = Field(json_schema_extra={"minItems": 1})
_FEW = Field(json_schema_extra={"maxItems": MAX_STOPS})


def within(bounds: Bounds) -> Any:
    """A field that may be left out, within its bounds."""
    return Field(default=None, ge=bounds.least, le=bounds.most)


def _only_true(value: bool | None) -> bool | None:
    if value is False:
        raise PydanticCustomError("only_true", "should be true, or left out")
    return value


_TAGS: Mapping[type, str] = {str: "#string", list: "#list", dict: "#object"}


def _json_type(value: object) -> str | None:
    return _TAGS.get(type(value))


def by_json_type(wish: str) -> Discriminator:
    """Tells the members of a union apart by their tags; `wish`: what a value of another JSON type should be."""
    return Discriminator(_json_type, custom_error_type="of_another_type", custom_error_message=wish)


_StopText = Annotated[
    str, Field(max_length=MAX_STOP_CHARS), AfterValidator(not_blank), Field(json_schema_extra={"minLength": 1})
]
Stop = Annotated[
    Annotated[_StopText, Tag("#string")] | Annotated[list[_StopText], AfterValidator(_few), _FEW, Tag("#list")],
    by_json_type("should be a string or a list of strings"),
]


class _VoiceId(Wire):
    id: str


NamedVoice = Annotated[
    Annotated[str, Tag("#string")] | Annotated[_VoiceId, Tag("#object")],
    by_json_type("should be a name or {'id': <name>}"),
]


def voice_name(voice: NamedVoice | None) -> str | None:
    return voice.id if isinstance(voice, _VoiceId) else voice


_TokenId = Annotated[int, Field(ge=TOKEN_ID.least, le=TOKEN_ID.most)]


def _a_word(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "should have more than blanks")
    return value


_BadWord = Annotated[
    str, Field(max_length=MAX_STOP_CHARS), AfterValidator(_a_word), Field(json_schema_extra={"pattern": r"\S"})
]
_DIGITS = "[0-9]{1,10}"


def _of_token_ids(biases: dict[str, float]) -> dict[str, float]:
    if all(re.fullmatch(_DIGITS, key) and TOKEN_ID.hold(int(key)) for key in biases):
        return biases
    raise PydanticCustomError("token_ids", "should have token ids as keys, for example {'50256': -100}")


_Biases = Annotated[
    dict[str, Annotated[float, Field(ge=CLIENT_BIAS.least, le=CLIENT_BIAS.most)]],
    FewKeys(MAX_BIASES),
    AfterValidator(_of_token_ids),
    Field(json_schema_extra={"propertyNames": {"pattern": f"^{_DIGITS}$"}, "maxProperties": MAX_BIASES}),
]


ANY_SEED = {"seed": (-1,)}
"""How clients of other servers say that any will do."""
ANY = {"max_tokens": (-1,), "max_completion_tokens": (-1,), **ANY_SEED}
"""The same of lengths too: as many tokens as fit."""


class Sampling(Wire):
    """How tokens are to be sampled, in vLLM's names; None leaves a value to the stage configuration."""

    others = Others(idle=ANY)

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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    logit_bias: _Biases | None = None

    def given(self) -> dict[str, Any]:
        """The values that the client sent, as vLLM's sampling parameters."""
        asked = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            asked["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        return asked


class StageSampling(Sampling):
    """How one stage is to sample. `detokenize`: as vLLM-Omni's clients send it; text is always made of text tokens."""

    detokenize: Annotated[bool | None, AfterValidator(_only_true), WithJsonSchema({"enum": [True, None]})] = None


_BEYOND: Mapping[str, str] = {
    "recursion limit exceeded": "is nested deeper than 200 levels; send one that is flatter",
    "number out of range": "has a number of more than 4300 digits; send a shorter one",
}
"""By what pydantic's parser says of JSON that is more than it reads, and may be valid."""


def beyond_parser(name: str, reason: str) -> BadRequest | None:
    """The refusal of such JSON; `reason`: what the parser says. None where that is another fault."""
    said = next((said for words, said in _BEYOND.items() if reason.startswith(words)), None)
    return None if said is None else invalid(None, f"{name} {said}.")


def refusal(fault: ErrorDetails) -> BadRequest:
    kind, value = fault["type"], fault["input"]
    if kind == "json_invalid":
        broken = BadRequest("The request body is not valid JSON in UTF-8; send one JSON object.", code="invalid_json")
        return beyond_parser("The request body", fault["ctx"]["error"]) or broken
    param = _path(fault["loc"])
    if kind == "part_type":
        param, value = f"{param}.type", value.get("type") if isinstance(value, dict) else None
    name = param or "The request body"
    if kind == "missing":
        return BadRequest(f"{name} is required.", param=param, code="missing_required_parameter")
    if kind == "unknown_key":
        return _unknown(param, **fault["ctx"])
    wish = _wish(fault).removeprefix("Input ").removeprefix("String ")
    return invalid(param, f"{name} is {shown(value)}, but it {wish}.")


def _unknown(param: str | None, key: str, value: object, wish: str) -> BadRequest:
    name = f"{param}.{_key(key)}" if param else _key(key)
    sentence = f"{name} is {shown(value)}, which is not supported; {wish}."
    return BadRequest(sentence, param=name, code="unsupported_parameter")


_AS_OF_JSON = {
    "list_type": "should be a valid array",
    "dict_type": "should be an object",
    "model_type": "should be an object",
}
"""What pydantic says in Python's words where a validator of ours came before it."""


def _wish(fault: ErrorDetails) -> str:
    if fault["type"] == "too_long":
        return f"should have at most {fault['ctx']['max_length']} entries"
    if fault["type"] == "float_type" and type(fault["input"]) is int:
        return "should be a finite number"  # one of more digits than a float has room for
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


def named_model(model: str | None, models: Collection[str]) -> str:
    """The first of `models` for a request that names none, as vLLM has it. Raises BadRequest for another one."""
    if not model:
        return next(iter(models))
    check_model(model, models)
    return model


def check_model(model: str, models: Collection[str]) -> None:
    if model not in models:
        raise BadRequest(
            f"The model {shown(model)} does not exist; use one of {', '.join(sorted(models))}.",
            param="model",
            code="model_not_found",
            status=404,
        )
