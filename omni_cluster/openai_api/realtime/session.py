"""The settings of a session, as clients send and read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.realtime.client_events import MOST_ID_CHARS
from omni_cluster.openai_api.realtime.parts import Part
from omni_cluster.openai_api.tools import Tool
from omni_cluster.openai_api.wire import refusal

PCM_HZ: Final = 24_000
G711_HZ: Final = 8_000
MOST_TOOLS: Final = 128
MOST_INSTRUCTION_CHARS: Final = 1 << 20
MOST_METADATA: Final = 16
MOST_TOKENS: Final = 4096
WHOLE: Final = frozenset({"format", "turn_detection", "transcription", "noise_reduction", "tool_choice", "truncation"})
"""Objects that an update replaces; those of others it goes into."""


def _tag(value: object) -> str:
    """Of a member of a union. The path that an error names leaves it out for its mark."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"#{kind}"


def _by_type(wish: str) -> Discriminator:
    return Discriminator(_tag, custom_error_type="of_another_type", custom_error_message=f"should have the type {wish}")


def _kind(value: object) -> str | None:
    """Of a word or an object, as it is sent and as it is kept."""
    return "#string" if isinstance(value, str) else "#object" if isinstance(value, dict | Part) else None


def _by_kind(wish: str) -> Discriminator:
    return Discriminator(_kind, custom_error_type="of_another_type", custom_error_message=wish)


class Pcm(Part):
    """Samples of 16 bits, little-endian, one channel."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = PCM_HZ

    @property
    def sample_rate_hz(self) -> int:
        return PCM_HZ


class _G711(Part):
    """A byte a sample."""

    @property
    def sample_rate_hz(self) -> int:
        return G711_HZ


class MuLaw(_G711):
    """Of telephones in North America and Japan."""

    type: Literal["audio/pcmu"]


class ALaw(_G711):
    """Of other telephones."""

    type: Literal["audio/pcma"]


Format = Annotated[
    Annotated[Pcm, Tag("#audio/pcm")] | Annotated[MuLaw, Tag("#audio/pcmu")] | Annotated[ALaw, Tag("#audio/pcma")],
    _by_type("'audio/pcm', 'audio/pcmu' or 'audio/pcma'"),
]


class Transcription(Part):
    """That the client's speech is to be written down; models of other services are accepted, and ours does it."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class NoiseReduction(Part):
    """Kept and shown; sound is taken as it comes."""

    type: Literal["near_field", "far_field"]


class ServerVad(Part):
    """A turn ends after `silence_duration_ms` without speech, which is where its likelihood is over `threshold`."""

    type: Literal["server_vad"]
    threshold: float = Field(default=0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(default=300, ge=0, le=10_000)
    silence_duration_ms: int = Field(default=500, ge=0, le=10_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: int | None = Field(default=None, ge=5_000, le=30_000)


class SemanticVad(Part):
    """The same by a wait that its `eagerness` names."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = Annotated[
    Annotated[ServerVad, Tag("#server_vad")] | Annotated[SemanticVad, Tag("#semantic_vad")],
    _by_type("'server_vad' or 'semantic_vad'"),
]


class SoundIn(Part):
    """What the client sends."""

    format: Format = Pcm()
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = ServerVad(type="server_vad")


def _named(voice: object) -> object:
    """The name in {"id": <name>}."""
    return voice.get("id") if isinstance(voice, dict) else voice


class SoundOut(Part):
    """`voice`: the name of one of the model's. `speed` is shown and changes nothing."""

    format: Format = Pcm()
    voice: Annotated[str | None, BeforeValidator(_named)] = None
    speed: float = Field(default=1.0, ge=0.25, le=1.5)


class Sound(Part):
    """Both directions."""

    input: SoundIn = SoundIn()
    output: SoundOut = SoundOut()


class Function(Part):
    """A tool, flat, as this protocol has it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(Part):
    """The tool that a response must call."""

    type: Literal["function"]
    name: str


class RetentionRatio(Part):
    """How much of a conversation stays once it is too long; shown, and taken for "auto"."""

    type: Literal["retention_ratio"]
    retention_ratio: float = Field(ge=0, le=1)


def _one_of_both(modalities: list[str]) -> list[str]:
    if len(modalities) != 1:
        raise PydanticCustomError("one_modality", "should be ['audio'], which comes with its text, or ['text']")
    return modalities


Modalities = Annotated[list[Literal["text", "audio"]], AfterValidator(_one_of_both)]


def _a_number_or_inf(tokens: int | str) -> int | str:
    if tokens != "inf" and not (isinstance(tokens, int) and 1 <= tokens <= MOST_TOKENS):
        raise PydanticCustomError("tokens", f"should be 1 to {MOST_TOKENS}, or 'inf'")
    return tokens


Tokens = Annotated[int | str, AfterValidator(_a_number_or_inf)]
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#string")] | Annotated[NamedFunction, Tag("#object")],
    _by_kind("should be 'none', 'auto', 'required' or {'type': 'function', 'name': <name>}"),
]
Truncation = Annotated[
    Annotated[Literal["auto", "disabled"], Tag("#string")] | Annotated[RetentionRatio, Tag("#object")],
    _by_kind("should be 'auto', 'disabled' or {'type': 'retention_ratio', 'retention_ratio': <ratio>}"),
]


class Asked(Part):
    """What a session presets, and a response may ask for in place of it."""

    instructions: str = Field(default="", max_length=MOST_INSTRUCTION_CHARS)
    output_modalities: Modalities = Field(default=["audio"])
    tools: list[Function] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Tokens = "inf"
    audio: Sound = Sound()

    @property
    def wants_sound(self) -> bool:
        return self.output_modalities == ["audio"]

    @property
    def max_tokens(self) -> int | None:
        return self.max_output_tokens if isinstance(self.max_output_tokens, int) else None


class Session(Asked):
    """`type` is of this protocol's other sessions too, of which none is served."""

    type: Literal["realtime"] = "realtime"
    truncation: Truncation = "auto"

    def updated(self, changes: Mapping[str, Any]) -> Session:
        """The session after a `session.update`: null and what is empty clear a setting. Raises BadRequest."""
        return checked(Session, merged(self.model_dump(), changes))


class ResponseAsked(Asked):
    """What one response is to be; `input`: items in place of the conversation's."""

    conversation: Literal["auto", "none"] = "auto"
    input: list[dict[str, Any]] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=MOST_ID_CHARS)]] = Field(default={}, max_length=MOST_METADATA)

    @classmethod
    def of(cls, session: Session, overrides: Mapping[str, Any] | None) -> ResponseAsked:
        """Raises BadRequest."""
        kept = session.model_dump(exclude={"type", "truncation"})
        return checked(cls, merged(kept, {k: v for k, v in (overrides or {}).items() if v is not None}))


def chat_tools(asked: Asked) -> list[Tool]:
    """As the chat API has them. Raises BadRequest for a name that no function may have."""
    flat = (tool.model_dump(exclude={"type"}, exclude_none=True) for tool in asked.tools)
    return [checked(Tool, {"type": "function", "function": function}) for function in flat]


def merged(current: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`current` with the values of `changes`; null takes a setting away, so that it has its default."""
    result = dict(current)
    for name, value in changes.items():
        before = result.get(name)
        if isinstance(value, dict) and isinstance(before, dict) and name not in WHOLE:
            result[name] = merged(before, value)
        elif value is None and name not in WHOLE - {"format", "tool_choice", "truncation"}:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def checked(kind: type[Any], value: Mapping[str, Any]) -> Any:
    """Raises BadRequest with one sentence and the field's path."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None
