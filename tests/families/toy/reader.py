"""A family of another shape: it reads text aloud and answers in none, and it has one voice without a name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.family import Family
from omni_cluster.models.stage import Stage
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest, Prompt
from omni_cluster.types.outputs import StageChunk
from toy.stages import CodesSpec, CodesStage, Sound

LOUDLY = "loudly"


class Read(CodesSpec):
    """Codes of the text that is to be read, which the request brings."""

    source = None
    reads = frozenset()

    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        return ReadStage(self, config, pipeline)


class ReadStage(CodesStage):
    """The codes of the toy, of the request's own text."""

    async def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        text = request.reply or ""
        words = text.upper() if request.speaking.get("instructions") == LOUDLY else text
        said = StageChunk(token_ids=tuple(words.encode()), finish_reason="stop")
        async for chunk in super().make(request, _one(said)):
            yield chunk


class Reader(Family):
    """Reads what it is given."""

    name = "toy_reader"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Read, Sound)
    presets = ("tiny",)
    voices = ()
    speaking = frozenset({"instructions"})

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        """There is no voice to choose."""

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        return Path(__file__).parent / "checkpoint"

    def reading(self, text: str) -> Prompt:
        return Prompt("")

    def check_speaking(self, field: str, value: str) -> None:
        super().check_speaking(field, value)
        if value != LOUDLY:
            raise RequestError(f"{field} is {value!r}; use {LOUDLY!r}.")


async def _one(chunk: StageChunk) -> AsyncIterator[StageChunk]:
    yield chunk
