"""How a sound stage forms its steps, of any family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field

from omni_cluster.config.problems import Strict


class SoundOptions(Strict, ABC):
    """How the engine of a sound stage forms its steps: what all families' options of such a stage have."""

    max_batch_size: int = Field(
        default=16, ge=1, description="Jobs of one step at most: whole answers, or chunks of streams.", examples=[16]
    )
    max_wait_ms: float = Field(
        default=5.0,
        ge=0,
        description="Milliseconds that the first job of an idle stage waits for others.",
        examples=[5.0],
    )
    max_streams: int = Field(
        default=64,
        ge=1,
        description="Streams whose state is kept on the device at once; others wait for their first sound.",
        examples=[64],
    )
    # Each a step behind the one before it: a player with one short piece does not wait for all steps of the next ones.
    max_pieces_at_once: int = Field(
        default=3,
        ge=1,
        le=3,
        description="Chunks of one stream that are made at once. 2 or 3: the next one begins a step behind the one "
        "before; 1: once that one is made.",
        examples=[3],
    )
    max_playout_delay_ms: float = Field(
        default=80.0,
        ge=0,
        le=1_000,
        description="Milliseconds by which the first sound of a stream is delayed at most, where chunks behind first "
        "ones came late in the last minute; `0`: never.",
        examples=[0],
    )

    @property
    @abstractmethod
    def max_step_size(self) -> int:
        """Of one step, all its jobs together, in the model's measure of a job: an option of the family's."""

    states_per_stream: ClassVar[int] = 2
    """Of each stream the one before its next piece, and the one after it.

    Two are enough for any number of pieces at once: what a piece keeps of a step replaces what the piece two before it
    kept of that step, which the piece between them has read. One is enough where a step replaces it at its end.
    """

    @property
    def stream_slots(self) -> int:
        """States of streams that have room."""
        return self.states_per_stream * self.max_streams
