"""Options of code2wav."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field

from omni_cluster.config.precision import LayerPrecision, Precision
from omni_cluster.config.schema import SoundOptions


class Code2WavOptions(SoundOptions):
    """Beside the engine's options: how large pieces are, and what the model computes in."""

    gone = MappingProxyType(
        {"resident_blocks": "leave it out, a stage that shares its card with all others knows it now"}
    )

    # As many as 128 first pieces of a stream, or a minute of sound. A single job may be larger; it runs alone.
    max_batch_frames: int = Field(
        default=6_144, ge=1, description="Mel frames of one step, all its jobs together.", examples=[6_144]
    )
    # Two, or the rest of a stream could not be split into whole blocks.
    max_piece_blocks: int = Field(
        default=16, ge=2, description="Blocks of one piece of a stream at most.", examples=[16]
    )
    dtype: LayerPrecision = Field(
        default="float32", description="What the model computes in; float32 is the reference.", examples=["bfloat16"]
    )
    vocoder_dtype: Precision = Field(
        default="float32", description="What the vocoder after it computes in.", examples=["tfloat32"]
    )
    cuda_graphs: bool = Field(
        default=True, description="On CUDA: replay captured graphs for batches of usual sizes.", examples=[True]
    )
