"""What enters the pipeline, and what one stage's engine is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from omni_cluster.types.codes import Codes
from omni_cluster.types.media import Media as Media
from omni_cluster.types.media import Video as Video
from omni_cluster.types.modalities import Modality
from omni_cluster.types.tool_use import ToolUse as ToolUse

EXTRA_KEY = "omni"
"""The key of vLLM's `SamplingParams.extra_args` under which a `StageExtra` travels to the workers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation after the chat template, media placeholders included.

    `token_ids`: set if a client's text in the prompt looks like the template's marks, but is to be text, and if it is
    long; None if `text` says it all, and is short enough for an engine to read beside others.
    """

    text: str
    token_ids: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class KnownOutput:
    """What a stage made of a request before it, or another stage, was lost: never made again, and gone on from.

    `token_ids`: all that were handed on, an end token among them; `codes`: of a stage that makes these.
    `finish_reason`: how the stage ended, None if it had not. `num_samples`: of the answer's sound, from its first on.
    `num_images`: of its pictures, likewise.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    num_samples: int = 0
    num_images: int = 0
    codes: Codes | None = None

    @property
    def made(self) -> int:
        """How many tokens or codes."""
        return len(self.token_ids) if self.codes is None else len(self.codes)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the stage fed itself, or is about to: the last one of an output that has ended never was.

        Those of codes are the values of the first codebook. A stage whose codes have ended is not asked for more.
        """
        if self.codes is not None:
            return self.codes.first_values
        return self.token_ids[:-1] if self.has_ended else self.token_ids


NOTHING_KNOWN = KnownOutput()


@dataclass(frozen=True, slots=True)
class OmniRequest:
    """One request to the whole pipeline.

    `prompt` is what the family's `render` made, or the text after the chat template: then all marks in it count as the
    template's, so it must hold no untrusted text. `sampling` holds, by stage name, what
    differs from the stage's default sampling parameters. `seed` makes the whole answer repeatable, the sound's
    noise included; two requests of one seed and one prompt give one waveform.
    `streams_audio`: sound in pieces, while more of it is being made; otherwise all at once, as the reference makes it.
    `reply`: text that is spoken in place of a reply of the model's own; None: the model answers. No media go with it.
    `conversation`: the same for all turns of one, which are brought to one replica; empty: of none.
    `known`: by stage name, of a request that is begun again.
    `speaking`: how to speak, by the fields that the family names (`Family.speaking`).
    `adapter`: the LoRA adapter, by the configuration's name, of the stage that has it; "": none.
    `tool_use`: the reply may call these tools; then its calls are kept apart from its text, and are not spoken.
    """

    request_id: str
    prompt: Prompt | str
    media: Media = field(default_factory=Media)
    wants_audio: bool = True
    voice: str | None = None
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int = 0
    streams_audio: bool = False
    reply: str | None = None
    conversation: bytes = b""
    known: Mapping[str, KnownOutput] = field(default_factory=dict)
    tool_use: ToolUse | None = None
    wants_images: bool = False
    speaking: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the answer is to be made of: text always."""
        wants: dict[Modality, bool] = {"text": True, "audio": self.wants_audio, "image": self.wants_images}
        return tuple(modality for modality, is_wanted in wants.items() if is_wanted)

    def known_of(self, stage: str) -> KnownOutput:
        return self.known.get(stage, NOTHING_KNOWN)

    def without_media(self) -> OmniRequest:
        """For stages that another one feeds: they never look at media, and a video's frames are a hundred megabytes."""
        return replace(self, media=Media())


class StageExtra(msgspec.Struct, frozen=True):
    """What travels with a request to scheduler and runner, beside vLLM's own fields.

    `key` is our name for the request, which later rows are addressed by. `rows_complete`: no more rows will come.
    `first_tokens`: the consumer waits for so many. `known`: output tokens that another engine made; `known_codes`: of a
    model that makes residual codes, all codes, of which these are the first ones.
    `prompt_codes`: of such a model, all codes of some of the prompt's positions, the first of which is its `start`.
    `rows`: packed rows and ids of the prompt's positions and, as far as they are known, of those behind it. What comes
    before the first of them is in blocks of its prefix, that the engine holds under the name `hold`. `pad_row`: packed,
    what every position after the last one given has, a row or an id; empty: nothing. `given_tokens`: the prompt's last
    ones are a reply that the request gives, which is no part of the prompt of the stage that reads its rows.
    """

    key: str
    emit_rows: bool = False
    given_tokens: int = 0
    rows_complete: bool = False
    first_tokens: int = 0
    known: tuple[int, ...] = ()
    known_codes: Codes | None = None
    prompt_codes: Codes | None = None
    hold: str = ""
    rows: tuple[bytes, ...] = ()
    pad_row: bytes = b""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> StageExtra | None:
        """The extra of a request, None for a request without one; `msgspec.ValidationError` for a malformed one."""
        wire = (extra_args or {}).get(EXTRA_KEY)
        return None if wire is None else msgspec.convert(wire, cls, builtin_types=(bytes,))

    def to_extra_args(self) -> dict[str, Any]:
        """As vLLM carries it: plain containers and bytes, which survive msgpack."""
        return {EXTRA_KEY: msgspec.to_builtins(self, builtin_types=(bytes,))}


class RowsPush(msgspec.Struct, frozen=True):
    """Packed rows or ids that come after a request was admitted: they follow those that request `key` has."""

    key: str
    rows: bytes
    complete: bool
