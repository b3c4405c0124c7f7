"""Codes of one codebook, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput
from omni_cluster.types.outputs import OmniRequestOutput, StageChunk


def coded(values: Iterable[int], start: int = 0) -> Codes | None:
    listed = [[value] for value in values]
    return Codes.of(start, listed) if listed else None


def codes_chunk(start: int, values: Iterable[int]) -> StageChunk:
    return StageChunk(codes=coded(values, start))


def codes_of(made: StageChunk | OmniRequestOutput) -> list[int]:
    return [] if made.codes is None else list(made.codes.first_values)


def known_codes(values: Sequence[int], finish_reason: str | None = None) -> KnownOutput:
    return KnownOutput(finish_reason=finish_reason, codes=coded(values))
