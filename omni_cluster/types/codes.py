"""Codes of sound, from the stage that makes them to the stage that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from omni_cluster.types.errors import PayloadError

ITEM_BYTES = 2


class Codes(msgspec.Struct, frozen=True, array_like=True):
    """Codes of one request that follow each other, the first at absolute position `start`.

    A code has one value of each of Q `codebooks`. `raw`: the values, int16, code after code, as the host orders bytes.
    What ends a request's codes is none of them. Raises PayloadError when made with anything else.
    """

    start: int
    codebooks: int
    raw: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.codebooks < 1 or len(self.raw) % (self.codebooks * ITEM_BYTES):
            raise PayloadError(
                f"Codes from {self.start} on of {self.codebooks} codebooks have {len(self.raw)} bytes, which are none."
            )

    @classmethod
    def of(cls, start: int, values: np.ndarray | Sequence[Sequence[int]]) -> Codes:
        """Of integers `[n, Q]`. Raises OverflowError for values that are no int16."""
        array = np.asarray(values, np.int16)
        return cls(start, array.shape[1], array.tobytes())

    @property
    def values(self) -> np.ndarray:
        """int16 `[n, Q]`, a view that is not to be written to."""
        return np.frombuffer(self.raw, np.int16).reshape(-1, self.codebooks)

    @property
    def first_values(self) -> tuple[int, ...]:
        """Of the first codebook: the tokens that the stage sampled."""
        return tuple(self.values[:, 0].tolist())

    def check_among(self, token_ids: Sequence[int]) -> None:
        """Raises PayloadError unless the first values are the tokens at the same positions."""
        if self.first_values != tuple(token_ids[self.start : self.end]):
            raise PayloadError(
                f"Codes from {self.start} to {self.end} have first values that are not the prompt's tokens there."
            )

    def __len__(self) -> int:
        return len(self.raw) // (self.codebooks * ITEM_BYTES)

    @property
    def end(self) -> int:
        """Absolute position after the last code."""
        return self.start + len(self)

    def after(self, position: int) -> Codes | None:
        """The part from an absolute position on; None when nothing is left, as for codes that came twice."""
        return self.between(position, self.end)

    def between(self, start: int, end: int) -> Codes | None:
        """What of them is between two absolute positions; None if there is nothing."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        size = self.codebooks * ITEM_BYTES
        return Codes(first, self.codebooks, self.raw[(first - self.start) * size : (last - self.start) * size])

    @staticmethod
    def joined(parts: Sequence[Codes]) -> Codes | None:
        """Codes of several that follow each other; None of none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        return Codes(parts[0].start, parts[0].codebooks, b"".join(part.raw for part in parts))
