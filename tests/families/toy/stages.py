"""The toy's three stages. Token, code and sample at a position depend on the request and on that position alone."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace
from pydantic import Field

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.problems import Strict
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.plain_stage import PlainStage
from omni_cluster.models.stage import Stage
from omni_cluster.models.stage_spec import PlainSpec, SoundFacts, StageSpec
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from toy.prompt import rows_of, seen, sum_of
from toy.tokenizer import END

if TYPE_CHECKING:
    from omni_cluster.models.family import Family

CODEBOOKS = 2
VALUES = 64
"""Of each codebook."""
RATE_HZ = 8_000
SAMPLES_PER_CODE = 160


class Options(Strict):
    """What a stage of the toy may be told."""

    token_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that a token, or the sound of one, takes.",
        examples=[0.01],
        json_schema_extra=PUBLIC,
    )


class ToySpec(PlainSpec):
    """What the three have in common."""

    Options = Options

    def __init__(self, family: Family) -> None:
        self.family = family


class Text(ToySpec):
    """Says what it was shown and told, and hands a row on for each token that it was told."""

    name = "text"
    emits = frozenset({"text", "rows"})
    samples_tokens = True

    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        return TextStage(self, config, pipeline)


class CodesSpec(ToySpec):
    """A code of two codebooks for each token of text, in the mood of the prompt's rows."""

    name = "codes"
    source = "text"
    emits = frozenset({"codes"})
    reads = frozenset({"text", "rows"})
    samples_tokens = True

    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        return CodesStage(self, config, pipeline)


class Sound(SoundFacts, ToySpec):
    """A tone for each code, exact from the first one on."""

    name = "sound"
    source = "codes"
    emits = frozenset({"sound"})
    reads = frozenset({"codes"})
    sample_rate_hz = RATE_HZ
    samples_per_code = SAMPLES_PER_CODE

    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        return SoundStage(self.family, config)


Code = tuple[int, int] | None
"""None ends them."""
Made = TypeVar("Made")


class SamplingStage(PlainStage):
    """Tokens or codes one by one, as many as the request asks for."""

    def __init__(self, spec: StageSpec, config: StageConfig, pipeline: PipelineConfig) -> None:
        super().__init__(spec.name)
        self._spec, self._config, self._limits = spec, config, pipeline.limits
        self.pause_s = Options(**config.options).token_s

    def check(self, request: OmniRequest) -> None:
        if request.media.audios or request.media.videos:
            raise RequestError("the toy takes text and pictures; leave other media out.")
        sampling = self._sampling(request)
        least, most = sampling.get("min_tokens", 0), self._most(sampling)
        if least > most:
            raise RequestError(f"min_tokens of stage {self.name} is {least}; use {most} at most.")

    def _sampling(self, request: OmniRequest) -> dict[str, Any]:
        return {**self._config.default_sampling_params, **request.sampling.get(self.name, {})}

    def _most(self, sampling: dict[str, Any]) -> int:
        return self._spec.most_tokens(self._limits, sampling)

    async def made(
        self, request: OmniRequest, sampled: AsyncIterator[Made], end: Made, filler: Made
    ) -> AsyncGenerator[tuple[int, Made, str | None], None]:
        """Place and value of each behind the known ones, and why it is the last one.

        `end` ends them; while more are asked for, there is `filler` in its place.
        """
        self.check(request)
        sampling, place = self._sampling(request), request.known_of(self.name).made
        least, most = sampling.get("min_tokens", 0), self._most(sampling)
        async for one in sampled:
            await asyncio.sleep(self.pause_s)
            if one == end and (sampling.get("ignore_eos") or place < least):
                one = filler
            ends = "stop" if one == end else "length" if place + 1 >= most else None
            yield place, one, ends
            if ends:
                return
            place += 1


class TextStage(SamplingStage):
    """The sizes of pictures and the prompt, or a reply that is given, byte by byte."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """The prompt's rows come first, also where all of the text is known: they are not."""
        prompt = tuple(str(request.prompt).encode())
        yield StageChunk(prompt_token_ids=prompt, rows=rows_of(prompt) if prompt else None)
        async with contextlib.aclosing(super().generate(request, upstream)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        known, says = request.known_of(self.name).token_ids, request.reply
        if says is None:
            says = seen(request.media) + str(request.prompt)
        tokens = itertools.chain((says.encode() or b" ")[len(known) :], itertools.repeat(END))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(token for token in known if token != END))
        async for place, token, ends in self.made(request, _each(tokens), END, 0):
            said = b"" if token == END else bytes([token])
            yield StageChunk(place, (token,), decoder.decode(said), finish_reason=ends)


class CodesStage(SamplingStage):
    """A code for each byte: what it is, and where; the latter after what the prompt was."""

    async def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        codes = _from(request.known_of(self.name).made, self._codes(request, upstream))
        async for place, code, ends in self.made(request, codes, None, (0, 0)):
            yield StageChunk(codes=Codes.of(place, [code]) if code else None, finish_reason=ends)

    async def _codes(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None) -> AsyncIterator[Code]:
        place, mood = 0, request.seed
        async for chunk in _unrepeated(upstream):
            mood += 0 if chunk.rows is None else sum_of(chunk.rows)
            for token in itertools.takewhile(lambda token: token != END, chunk.token_ids):
                yield token % VALUES, (token // VALUES + place + mood) % VALUES
                place += 1
        while True:
            yield None


class SoundStage(PlainStage):
    """A tone of 20 ms for each code, in the pitch of its voice."""

    def __init__(self, family: Family, config: StageConfig) -> None:
        super().__init__(Sound.name)
        self._family = family
        self._pause_s = Options(**config.options).token_s

    async def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        voice = self._family.check_voice(request.voice)
        pitch = 1 + self._family.voices.index(voice) if voice else 1
        known, start, waiting = request.known_of(self.name).num_samples, 0, list[np.ndarray]()
        async for first, second in _codes(upstream):
            await asyncio.sleep(self._pause_s)
            waiting.append(tone(first * pitch, second))
            if request.streams_audio:
                yield StageChunk(audio=_heard(start, waiting, known))
                start, waiting = start + SAMPLES_PER_CODE, []
        if waiting:
            yield StageChunk(audio=_heard(start, waiting, known))
        yield StageChunk(finish_reason="stop")


def tone(first: int, second: int) -> np.ndarray:
    """Float32 [160]: a tone of `first` times 50 Hz, louder with `second`."""
    times_s = np.arange(SAMPLES_PER_CODE) / RATE_HZ
    return (np.sin(2 * np.pi * 50 * (1 + first) * times_s) * (1 + second) / (1 + VALUES)).astype(np.float32)


def _heard(start: int, waiting: list[np.ndarray], known: int) -> AudioChunk | None:
    """What of the sound its client has not got."""
    audio = AudioChunk(start, np.concatenate(waiting), RATE_HZ)
    return audio.part(max(0, known - start), len(audio.samples)) if audio.end > known else None


async def _codes(upstream: AsyncIterator[StageChunk] | None) -> AsyncIterator[tuple[int, int]]:
    """Each code once: a chunk may come twice."""
    place = 0
    async for chunk in upstream or _each(()):
        if chunk.codes is not None and (new := chunk.codes.after(place)) is not None:
            place = new.end
            for first, second in new.values.tolist():
                yield first, second


async def tokens_of(upstream: AsyncIterator[StageChunk] | None) -> AsyncIterator[int]:
    """Each token once."""
    async for chunk in _unrepeated(upstream):
        for token in chunk.token_ids:
            yield token


async def _unrepeated(upstream: AsyncIterator[StageChunk] | None) -> AsyncIterator[StageChunk]:
    """Chunks without the tokens that came before: a chunk may come twice."""
    place = 0
    async for chunk in upstream or _each(()):
        yield replace(chunk, token_ids=chunk.token_ids[max(0, place - chunk.token_start) :])
        place = max(place, chunk.token_end)


async def _each(values: Any) -> AsyncIterator[Any]:
    for value in values:
        yield value


async def _from(place: int, values: AsyncIterator[int]) -> AsyncIterator[int]:
    """Those from a place on."""
    async for value in values:
        if place > 0:
            place -= 1
        else:
            yield value
