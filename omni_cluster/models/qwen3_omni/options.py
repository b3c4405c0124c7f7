"""Options of code2wav."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES


class Code2WavOptions(SoundOptions):
    """How code2wav forms its steps, how large chunks of a stream are, and what the model computes in."""

    # A step replaces the state of each of its streams once nothing of it can fail.
    states_per_stream: ClassVar[int] = 1

    # As many as 90 first pieces of a stream, or 16 of those that a stream is cut into when it is made again.
    max_batch_codes: int = Field(
        default=1_024,
        ge=1,
        description="Codes of one step at most, all its jobs together, those before each job among them that are seen "
        "again. Steps are smaller while something is urgent.",
        examples=[1_024],
    )
    max_piece_codes: int = Field(
        default=PASS_CODES,
        ge=1,
        le=PASS_CODES,
        description="Codes of one chunk of a stream at most, 0.08 s each.",
        examples=[PASS_CODES],
    )
    dtype: Literal["float32", "tfloat32", "bfloat16"] = Field(
        default="float32",
        description="Precision of products and convolutions; `float32` is the reference's.",
        examples=["bfloat16"],
        json_schema_extra=PUBLIC,
    )
    cuda_graphs: bool = Field(
        default=True,
        description="On a GPU: graphs are captured at the start, for passes of usual sizes.",
        examples=[True],
    )

    @property
    def max_step_size(self) -> int:
        return self.max_batch_codes
