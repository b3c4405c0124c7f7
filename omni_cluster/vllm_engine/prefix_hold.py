"""What a request on its way to an engine holds of the engine's prefix cache."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from omni_cluster.rows import PrefixHashes

_NUMBERS = itertools.count()


class PrefixHold:
    """One request's blocks in the engine. They are its own once it is there; until then they are to be let go of.

    `call`: of the engine's own calls, by name. `is_there`: whether the engine has the request, or is about to.
    """

    def __init__(self, request_id: str, call: Callable[..., Awaitable[Any]]) -> None:
        self.name = f"{request_id}-{next(_NUMBERS)}"  # a request that is begun again may be here twice
        self.is_there: Callable[[], bool] = lambda: False
        self._call = call
        self._is_asked = False

    async def positions(self, prefix: PrefixHashes) -> int:
        """How many positions of the prompt need no rows. To be asked once."""
        self._is_asked = True  # before the answer, which may not be waited for
        asked = msgspec.to_builtins(prefix, builtin_types=(bytes,))
        blocks: int = await self._call("omni_hold_prefix", self.name, asked)
        return blocks * prefix.block_size

    async def let_go(self) -> None:
        """At the request's end."""
        if self._is_asked and not self.is_there():
            await self._call("omni_release_prefix", self.name)
