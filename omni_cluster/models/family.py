"""What a model family tells the rest of the project: its stages, their engines, and the hand-over between them.

Engines, workers and the cluster know stages only through these types; ids, tensors and stage names of a family stay
in its own folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.stage_spec import Part, StageSpec
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import ConfigError, RequestError
from omni_cluster.types.inputs import KnownOutput, Prompt
from omni_cluster.types.media import ALL_FRAMES, FramePolicy
from omni_cluster.types.rows import PrefixHashes, Rows

if TYPE_CHECKING:
    import torch

    from omni_cluster.models.checkpoint_maker import Weight


@dataclass(frozen=True, slots=True)
class StreamInterval:
    """How many tokens a chunk has at least: one until `first` tokens are handed on, then `then`, at last `late`.

    A consumer that takes tokens in blocks would do nothing with less, and every chunk keeps three processes busy.
    `late`: from `late_from` tokens on, when the consumer has so much ahead of it that more may come at once.
    """

    first: int
    then: int
    late: int
    late_from: int

    def after(self, handed_on: int) -> int:
        """The least number of tokens of the next chunk, after `handed_on` tokens."""
        if handed_on < self.first:
            return 1
        return self.then if handed_on < self.late_from else self.late


@dataclass(frozen=True, slots=True)
class GivenReply:
    """A reply that the request gives: the prompt's last tokens, which the stage emits in place of tokens of its own."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class EngineInput:
    """What an AR engine is given for a request.

    `prompt`: a vLLM prompt, text with media or token ids. `sampling`: parameters that the family insists on, whatever
    configuration and client say. `emit_rows`: the next stage needs a row per position. `rows`: what each position has
    beside its token, part after part, of rows or of ids (`Rows.of_ids`); the engine holds what is before the first, in
    blocks of its prefix. `pad_row`: what every position after the last one given has, a row or an id; None: nothing.
    `rows_complete`: no later ones will come; `is_part`: later ones are needed before the first new token, too.
    `prompt_codes`: all codes of the prompt's positions from their `start` on, where the prompt's tokens are the first
    values and the model `has_residual_codes`. `stream_interval`: None for a chunk for each token.
    """

    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    emit_rows: bool = False
    rows_complete: bool = True
    is_part: bool = False
    stream_interval: StreamInterval | None = None
    given_reply: GivenReply | None = None
    rows: Sequence[Rows] = ()
    pad_row: Rows | None = None
    prompt_codes: Codes | None = None


Hold = Callable[[PrefixHashes], Awaitable[int]]
"""Tells how many positions of a prompt the engine has, and keeps them for the request that asks. Asked once at most."""


@dataclass(frozen=True, slots=True)
class LaterRows:
    """Rows or ids that follow what was given so far. `complete`: no more will come."""

    rows: Rows
    complete: bool


@dataclass(frozen=True, slots=True)
class Hearing:
    """What is to be written of a sound.

    `language`: English name of what is spoken, None if it is not known. `into`: the language of a translation; None: as
    it is spoken. `hint`: words of the client that the sound may follow on, or use.
    """

    language: str | None = None
    into: str | None = None
    hint: str = ""


class ARSession(Protocol):
    """One request in one AR stage: turns what comes from upstream into the engine's input.

    `known`: what of the stage's output follows the prompt, of a request that is begun again.
    """

    known: KnownOutput

    async def prompt(self) -> EngineInput | None:
        """Waits until the stage can start, with the first of its prompt's rows; None when there is nothing to do."""

    def later_rows(self) -> AsyncIterator[LaterRows]:
        """Rows that come while the stage works; called once, after `prompt` gave `rows_complete=False`.

        Ends without complete ones when there turned out to be nothing for the stage to do.
        """


class Family(ABC):
    """A model family bound to one checkpoint folder."""

    name: ClassVar[str]
    stages: ClassVar[Mapping[str, type[StageSpec]]]
    """By name, in the order of the data."""
    frames: ClassVar[FramePolicy] = ALL_FRAMES
    """Which frames of a video the family's model is shown."""
    presets: ClassVar[tuple[str, ...]] = ()
    """Checkpoints that the family makes by itself or ships, for `model: preset:NAME`."""
    speaking: ClassVar[frozenset[str]] = frozenset()
    """Fields by which a request may say how to speak. The speech API has `language` and `instructions`."""

    @abstractmethod
    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        """Reads configuration and voices, no weights; ConfigError for a voice that the checkpoint lacks."""

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        """The folder of one of `presets`, which is in the package or made on first use."""
        raise ConfigError(f"preset is {preset!r}, but family {cls.name} makes no checkpoint; name a folder.")

    @classmethod
    def make_checkpoint(
        cls, preset: str, out: Path, *, device: str | None = None, progress: Callable[[str], None] = print
    ) -> object:
        """Writes a checkpoint of random weights in the hub's layout to `out`; its summary can be printed."""
        raise ConfigError(f"--family is {cls.name!r}, which makes no checkpoint; use another one.")

    @classmethod
    def drawn(cls, weight: Weight, device: torch.device) -> torch.Tensor:
        """A tensor of a made checkpoint whose files have names and no values."""
        raise ConfigError(f"load_format is 'drawn', but family {cls.name} draws no weights; leave it out.")

    @classmethod
    def chats(cls) -> bool:
        """Whether a stage answers in text: then `render` and the methods beside it are the family's own."""
        return any("text" in stage.emits for stage in cls.stages.values())

    @classmethod
    def makers(cls) -> Mapping[Part, str]:
        """Which stage makes what: names, by what they emit."""
        return {part: stage.name for stage in cls.stages.values() for part in sorted(stage.emits)}

    @cached_property
    def specs(self) -> Mapping[str, StageSpec]:
        """The stages of this checkpoint."""
        return {name: spec(self) for name, spec in self.stages.items()}

    @property
    @abstractmethod
    def voices(self) -> tuple[str, ...]:
        """Voices that a request may name, the default one first; there may be none."""

    @property
    def voice_aliases(self) -> Mapping[str, str]:
        """Voices of `voices` by the names that clients of other services and models send."""
        return {}

    def audio_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        """How many tokens of a prompt stand for sound."""
        return 0

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The prompt of a conversation, by the checkpoint's own chat template; only its own marks count as marks.

        Tools, and calls of them, are written as the family was taught where that template has no place for them.
        """
        raise self._no_chat()

    def reading(self, text: str) -> Prompt:
        """The prompt of a reply that is given to be spoken: `text`. RequestError for text that cannot be one."""
        raise RequestError(f"{self.name} makes no sound; ask another model.")

    def hearing(self, hearing: Hearing) -> Prompt:
        """The prompt for writing down one sound, which goes with it."""
        raise self._no_chat()

    def completing(self, text: str | Sequence[int]) -> Prompt:
        """The prompt of a text, or of its tokens, that is gone on with as it is: all marks in it are the model's.

        Its tokens are counted, so that of several prompts none has begun when one is too long.
        RequestError for an empty one, for tokens that the model has not, and for marks of media, of which there are
        none.
        """
        raise self._no_chat()

    @property
    def prompts(self) -> PromptMaker:
        """From text to tokens, and back."""
        raise self._no_chat()

    @property
    def vocab_size(self) -> int:
        """Tokens that the model has."""
        raise self._no_chat()

    def _no_chat(self) -> RequestError:
        return RequestError(f"{self.name} answers in no text; use /v1/audio/speech.")

    def check_voice(self, voice: str | None) -> str:
        """The voice to speak in, "" where there are none; RequestError for one that the checkpoint lacks."""
        if voice is None:
            return self.voices[0] if self.voices else ""
        if voice not in self.voices:
            use = f"use one of {', '.join(self.voices)}" if self.voices else "leave it out"
            raise RequestError(f"voice is {voice!r}; {use}.")
        return voice

    def check_speaking(self, field: str, value: str) -> None:
        """RequestError for a field that is none of `speaking`, and for a value by which the model cannot speak."""
        if field not in self.speaking:
            raise RequestError(f"{field} is {value!r}, but {self.name} does not heed it; leave it out.")
