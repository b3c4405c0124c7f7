"""What a stage emits, chunk by chunk, and what the pipeline answers as a whole."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import astuple, replace

from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import PayloadError
from omni_cluster.types.rows import Earlier, Rows

if TYPE_CHECKING:
    MaybeRows = Rows | None
else:
    MaybeRows = None  # on the wire: there rows are beside the chunk


MAX_IMAGES = 16
"""Of a request."""
MAX_IMAGE_BYTES = 16 << 20


class AudioChunk(msgspec.Struct, frozen=True, array_like=True):
    """Sound: float32 mono `samples` in [-1, 1], the first at absolute position `start`."""

    start: int
    samples: np.ndarray
    sample_rate_hz: int

    @property
    def end(self) -> int:
        return self.start + len(self.samples)

    def part(self, first: int, end: int) -> AudioChunk:
        """Samples `first` to `end`, counted from this sound's own start, as a view."""
        return replace(self, start=self.start + first, samples=self.samples[first:end])


class ImageChunk(msgspec.Struct, frozen=True, array_like=True):
    """A whole picture: a PNG file, and its `number` among those of its request, from 0.

    Raises PayloadError for one beyond `MAX_IMAGES` or `MAX_IMAGE_BYTES`.
    """

    number: int
    png: bytes

    def __post_init__(self) -> None:
        if self.number not in range(MAX_IMAGES) or len(self.png) > MAX_IMAGE_BYTES:
            raise PayloadError(
                f"picture {self.number} has {len(self.png)} bytes; a request has at most {MAX_IMAGES} pictures, "
                f"each of at most {MAX_IMAGE_BYTES} bytes."
            )


@dataclass(frozen=True, slots=True)
class HandoverTimes:
    """Seconds from a chunk's making to its arrival at the stage that consumes it: median and longest of a request."""

    p50_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, and the natural logarithm of its probability before temperature and penalties.

    `utf8`: the token's own bytes. `token` is empty for one that is only the beginning of a character, and is the whole
    character for one that ends it.
    """

    token: str
    logprob: float
    utf8: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token that was sampled, and the likeliest in its place, at least as many as asked for, the likeliest first."""

    sampled: TokenLogprob
    likeliest: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the reply's call number `index`: `id` and `name` come first, then `arguments`, JSON as text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the reply calls; `arguments` is JSON as text, cut where the reply was."""

    id: str
    name: str
    arguments: str


class StageChunk(msgspec.Struct, frozen=True, array_like=True):
    """What a stage made of one request since its last chunk, in the code and, without its rows, on the wire.

    All positions are absolute in the request, so that a chunk that comes twice is noticed and dropped:
    `token_ids`, those of text, start at `token_start`; `codes`, `rows` and `audio` have their own start, `images` their
    own numbers.
    `prompt_token_ids` is in a request's first chunk only. `finish_reason` is in the last one: "stop" or "length";
    `handover` too: how the stage's own input came. `made_at_s`: wall-clock time at which the chunk was made, of several
    joined ones the first. `choices`: of the text's tokens, where the request asked for them; none of an end token.
    `cached_tokens`: of the prompt, read from the engine's prefix cache; in the chunk that has the prompt.
    `calls`: what of the reply calls tools; `text` is the rest.
    Two chunks are equal that say the same, whenever they were made.
    """

    token_start: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    rows: MaybeRows = None
    audio: AudioChunk | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    handover: HandoverTimes | None = None
    made_at_s: float = msgspec.field(default_factory=time.time)
    choices: tuple[TokenChoice, ...] = ()
    cached_tokens: int = 0
    calls: tuple[CallDelta, ...] = ()
    images: tuple[ImageChunk, ...] = ()
    codes: Codes | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StageChunk):
            return NotImplemented
        return astuple(replace(self, made_at_s=other.made_at_s)) == astuple(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def token_end(self) -> int:
        return self.token_start + len(self.token_ids)

    @property
    def made(self) -> range:
        """The positions of its tokens, or of its codes."""
        if self.codes is not None:
            return range(self.codes.start, self.codes.end)
        return range(self.token_start, self.token_end)

    @property
    def only_rows(self) -> bool:
        """It hands rows of a prompt on, while more of the prompt is computed, and says nothing to a client."""
        said = self.token_ids or self.text or self.calls or self.images or self.codes
        return not (said or self.audio is not None or self.finish_reason is not None)

    def without_rows(self) -> StageChunk:
        return self if self.rows is None else replace(self, rows=None)

    def cut(self, max_samples: int) -> Iterator[StageChunk]:
        """The same in chunks of at most a picture and `max_samples` samples; the last says all else, too."""
        for image in self.images[:-1]:
            yield StageChunk(self.token_start, images=(image,), made_at_s=self.made_at_s)
        yield from replace(self, images=self.images[-1:])._cut_sound(max_samples)

    def _cut_sound(self, max_samples: int) -> Iterator[StageChunk]:
        audio = self.audio
        if audio is None or len(audio.samples) <= max_samples:
            yield self
            return
        last = (len(audio.samples) - 1) // max_samples * max_samples
        for first in range(0, last, max_samples):
            yield StageChunk(self.token_start, audio=audio.part(first, first + max_samples), made_at_s=self.made_at_s)
        yield replace(self, audio=audio.part(last, len(audio.samples)))

    @staticmethod
    def joined(chunks: Sequence[StageChunk]) -> StageChunk:
        """One chunk that says what the given ones, contiguous and in order, said; the last one's end is its end."""
        if len(chunks) == 1:
            return chunks[0]
        rows = [c.rows for c in chunks if c.rows is not None]
        audio = [c.audio for c in chunks if c.audio is not None]
        return replace(
            chunks[-1],
            token_start=chunks[0].token_start,
            token_ids=tuple(t for c in chunks for t in c.token_ids),
            text="".join(c.text for c in chunks),
            rows=Rows.joined(rows) if rows else None,
            audio=join_audio(audio) if audio else None,
            prompt_token_ids=next((c.prompt_token_ids for c in chunks if c.prompt_token_ids is not None), None),
            made_at_s=chunks[0].made_at_s,
            choices=tuple(choice for c in chunks for choice in c.choices),
            cached_tokens=sum(c.cached_tokens for c in chunks),
            calls=tuple(call for c in chunks for call in c.calls),
            images=tuple(image for c in chunks for image in c.images),
            codes=Codes.joined([c.codes for c in chunks if c.codes is not None]),
        )


def answering(chunk: StageChunk, earlier: Earlier) -> StageChunk:
    """The chunk; if it leaves rows of its prompt out, they can be asked for by `earlier`."""
    rows = chunk.rows
    if rows is None or rows.prefix is None or rows.start == 0:
        return chunk
    return replace(chunk, rows=dataclasses.replace(rows, earlier=earlier))


def join_calls(deltas: Sequence[CallDelta]) -> tuple[Call, ...]:
    """The calls that the deltas, in order, are pieces of."""
    calls: dict[int, Call] = {}
    for delta in deltas:
        before = calls.get(delta.index, Call("", "", ""))
        calls[delta.index] = Call(delta.id or before.id, delta.name or before.name, before.arguments + delta.arguments)
    return tuple(calls.values())


def join_audio(pieces: Sequence[AudioChunk]) -> AudioChunk:
    return replace(pieces[0], samples=np.concatenate([p.samples for p in pieces]))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When a stage worked on a request, seconds since the request entered: first and last chunk.

    `finish_reason`: how the stage ended, "stop" or "length". `handover_p50_s`, `handover_max_s`: see `HandoverTimes`;
    None for a stage that the request itself feeds.
    """

    first_s: float
    last_s: float
    tokens: int = 0
    finish_reason: str | None = None
    handover_p50_s: float | None = None
    handover_max_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: of its prompt, of the text made, and codes made. Of the prompt's, `cached` were read from
    the prefix cache, and `prompt_audio` are sound.
    """

    prompt: int
    text: int
    codec: int
    cached: int = 0
    prompt_audio: int = 0


@dataclass(frozen=True, slots=True)
class OmniRequestOutput:
    """The whole answer to one request.

    `token_ids` are those of the text, `codes` what its sound was made of. `finish_reason`: "length" where any stage
    reached its limit. `audio`: None without sound. `images`: PNG files, none unless pictures were asked for. `choices`,
    `calls`: see `StageChunk`. `cached_tokens`, `prompt_audio_tokens`: see `TokenCounts`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str | None
    codes: Codes | None = None
    audio: AudioChunk | None = None
    times: dict[str, StageTimes] = field(default_factory=dict)
    choices: tuple[TokenChoice, ...] = ()
    cached_tokens: int = 0
    prompt_audio_tokens: int = 0
    calls: tuple[Call, ...] = ()
    images: tuple[bytes, ...] = ()

    @property
    def codec_tokens(self) -> int:
        """How many codes were made."""
        return 0 if self.codes is None else len(self.codes)

    @property
    def makes_calls(self) -> bool:
        return bool(self.calls)

    @property
    def counts(self) -> TokenCounts:
        prompt, text = len(self.prompt_token_ids), len(self.token_ids)
        return TokenCounts(prompt, text, self.codec_tokens, self.cached_tokens, self.prompt_audio_tokens)
