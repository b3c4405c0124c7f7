"""A request's codes for its stage of sound, as they come."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator

import numpy as np

from omni_cluster.types.errors import TokenError
from omni_cluster.types.outputs import StageChunk


class CodeReader:
    """A request's codes, read in the background while its jobs run; as many as their maker may make.

    A code has one value of each codebook. An invalid one ends its request here: in a batch it would be an index out of
    range, which ends all requests.
    """

    def __init__(self, upstream: AsyncIterator[StageChunk], num_codes: int, codebooks: int = 1) -> None:
        self._upstream = upstream
        self._num_codes = num_codes
        self._codebooks = codebooks
        self._codes = array("h")
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Reads as long as the context is open; however that ends, no reader is left."""
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._changed.set())
        try:
            yield
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async for chunk in self._upstream:
            new = None if chunk.codes is None else chunk.codes.after(len(self))  # what comes twice is dropped
            if new is not None:
                self._check(new.values)
                self._codes.frombytes(new.raw)
            self._changed.set()

    def _check(self, codes: np.ndarray) -> None:
        if codes.shape[1] != self._codebooks:
            raise TokenError(f"codes are of {codes.shape[1]} codebooks; there are {self._codebooks}.")
        wrong = codes[(codes < 0) | (codes >= self._num_codes)]
        if len(wrong):
            raise TokenError(f"token {wrong[0]} is no code of sound; codes are 0 to {self._num_codes - 1}.")

    @property
    def complete(self) -> bool:
        """No more codes will come."""
        return self._task is not None and self._task.done()

    async def wait_for(self, count: int) -> None:
        """Waits until `count` codes are there, or all that will come. Raises what the upstream raised."""
        while len(self) < count and not self.complete:
            self._changed.clear()
            await self._changed.wait()
        self._raise_error()

    async def wait_for_all(self) -> None:
        """Waits until no more codes will come. Raises what the upstream raised."""
        while not self.complete:
            self._changed.clear()
            await self._changed.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    def between(self, start: int, end: int) -> np.ndarray:
        """Codes int16 `[n, Q]`."""
        values = self._codes[start * self._codebooks : end * self._codebooks]
        return np.array(values, np.int16).reshape(-1, self._codebooks)

    def __len__(self) -> int:
        return len(self._codes) // self._codebooks
