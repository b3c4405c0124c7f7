"""What a batch may take of memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from omni_cluster.batch.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of each process that asks.

    `rows_at_once`: requests in flight. `rows_a_block`: rows that are written together; a job that is killed asks at
    most `rows_at_once + 2 * rows_a_block` rows of each process again. `patience_s`: how long a row waits for an
    application that cannot take it, from its first refusal; work on it that was lost does not count. `timeout_s`: how
    long an answer may take; it is longer than the server's own `limits.request_timeout_s`, so that silence means that
    the server is lost.
    `max_media_bytes`: of one media file. Raises BatchError for a figure that is not above 0.
    """

    rows_at_once: int = 32
    rows_a_block: int = 8
    patience_s: float = 300.0
    timeout_s: float = 900.0
    max_media_bytes: int = 26_214_400

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise BatchError(f"{name} is {getattr(self, name)}; use a number above 0.")

    @property
    def blocks_at_once(self) -> int:
        """One more than the rows in flight fill: the last rows of a block leave places to the next one."""
        return -(-self.rows_at_once // self.rows_a_block) + 1
