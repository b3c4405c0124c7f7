"""Options of code2wav."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.precision import LayerPrecision, Precision
from omni_cluster.config.sound_options import SoundOptions


class Code2WavOptions(SoundOptions):
    """How code2wav forms its steps, how large chunks of a stream are, and what the model computes in."""

    gone = MappingProxyType(
        {"resident_blocks": "leave it out, a stage that shares its card with all others knows it now"}
    )

    # As many as 128 first pieces of a stream, or a minute of sound. A single job may be larger; it runs alone.
    max_batch_frames: int = Field(
        default=6_144,
        ge=1,
        description="Mel frames of one step at most, all its jobs together; a longer job runs alone. Steps are smaller "
        "while something is urgent.",
        examples=[6_144],
    )
    # Two, or the rest of a stream could not be split into whole blocks.
    max_piece_blocks: int = Field(
        default=16, ge=2, description="Blocks of one chunk of a stream at most, 0.24 s each.", examples=[16]
    )
    # A block's: what the flow sees of what follows. At least one: a job without is its stream's last.
    look_ahead_codes: int = Field(
        default=12,
        ge=1,
        le=12,
        description="Codes behind a chunk of a stream that are computed with it. `12`, a block, is all that the flow "
        "sees of them; with `6` a stream begins six codes earlier, and its sound is less exact at the ends of chunks.",
        examples=[12],
    )
    # 2 is one step. Above 32 the keys and values that a stream keeps of each evaluation take more than they give.
    num_steps: int = Field(
        default=10,
        ge=2,
        le=32,
        description="Points in time of the flow, as transformers' `token2wav_num_steps`; `10` is the reference's. The "
        "flow's work grows with them less one: `5` is 4/9 of it, in another sound.",
        examples=[10],
    )
    dtype: LayerPrecision = Field(
        default="float32",
        description="Precision of the DiT's products; `float32` is the reference's. `float8`: bfloat16, with the "
        "layers' products in float8, on a shared card in steps of more than eight blocks; a GPU needs "
        "compute capability 8.9.",
        examples=["bfloat16"],
        json_schema_extra=PUBLIC,
    )
    vocoder_dtype: Precision = Field(
        default="float32", description="Precision of the vocoder; `float32` is the reference's.", examples=["tfloat32"]
    )
    cuda_graphs: bool = Field(
        default=True,
        description="On a GPU: graphs are captured at the start, for batches of usual sizes.",
        examples=[True],
    )

    @property
    def max_step_size(self) -> int:
        return self.max_batch_frames
