"""A family of another shape: it answers in text and in a picture of it, and has no sound."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from PIL import Image

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.plain_stage import PlainStage
from omni_cluster.models.stage import Stage
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import ImageChunk, StageChunk
from toy.family import Toy
from toy.stages import Text, ToySpec, tokens_of

SIDE = 16
"""Pixels of each side of a picture."""


class Picture(ToySpec):
    """A picture of the whole text."""

    name = "picture"
    source = "text"
    emits = frozenset({"image"})
    reads = frozenset({"text"})

    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        return PictureStage(self.name)


class PictureStage(PlainStage):
    """It begins once it has all of the text."""

    async def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        if not request.known_of(self.name).num_images:
            tokens = [token async for token in tokens_of(upstream)]
            yield StageChunk(images=(ImageChunk(0, picture(tokens, request.seed)),))
        yield StageChunk(finish_reason="stop")


def picture(tokens: Sequence[int], seed: int) -> bytes:
    """A PNG file of `SIDE` times `SIDE` pixels, their colors made of the tokens and the seed."""
    colors = hashlib.shake_256(repr((list(tokens), seed)).encode()).digest(3 * SIDE * SIDE)
    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), colors).save(file, "PNG")
    return file.getvalue()


class Painter(Toy):
    """Says what it was told, and paints it."""

    name = "toy_painter"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Text, Picture)
    voices = ()

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        """There is no voice to choose."""
