"""Blocks of the KV cache that are promised to requests, whose rows are not sent for what these blocks hold.

An engine that takes rows knows nothing of a prompt by its tokens, which are the same for all. Whoever makes the rows
names the prompt's blocks, and blocks of one name hold the same here. `HeldPrefixes` is in the engine's core, and a
`PrefixHold` in the replica.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from omni_cluster.types.rows import HASH_BYTES, PrefixHashes
from omni_cluster.vllm_engine.holders import Holders

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

_NUMBERS = itertools.count()


class HeldPrefixes:
    """Cached blocks by the name of their reader: as long as they are held, their memory is given to no other request.

    `max_blocks` at most, one that several hold counted once, so that what is left is enough for the longest request:
    one that needs more waits for no block that a waiting one holds.
    """

    def __init__(self, manager: KVCacheManager, block_size: int, max_blocks: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._max_blocks = max(0, max_blocks)
        self._held: dict[str, list[KVCacheBlock]] = {}
        self._holders: Holders[int] = Holders()
        self._to_evict: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks with a holder."""
        return len(self._holders)

    def hold(self, name: str, prefix: PrefixHashes) -> int:
        """Returns how many of the prompt's blocks, from the first on, are in the cache, and now held for `name`."""
        if prefix.block_size != self._block_size or not self._manager.enable_caching or name in self._held:
            return 0
        hashes: list[BlockHash] = list(prefix.hashes)  # type: ignore[arg-type]
        groups, _, _ = self._manager.coordinator.find_longest_cache_hit(hashes, len(hashes) * self._block_size)
        if len(groups) != 1:  # layers of several kinds have caches of their own, and hits of others
            return 0
        blocks = list(takewhile(self._take, groups[0]))
        if blocks:
            self._manager.block_pool.touch(blocks)
            self._held[name] = blocks
        return len(blocks)

    def _take(self, block: KVCacheBlock) -> bool:
        """Counts a holder more, if there is room for the block and the cache is to keep it."""
        if block.block_id in self._to_evict:
            return False
        if block.block_id not in self._holders and len(self._holders) >= self._max_blocks:
            return False
        self._holders.hold([block.block_id])
        return True

    def release(self, name: str) -> None:
        """No-op for a name that holds nothing."""
        blocks = self._held.pop(name, [])
        free = self._to_evict.intersection(self._holders.let_go(block.block_id for block in blocks))
        self._to_evict -= free
        self._manager.evict_blocks(free)
        self._manager.block_pool.free_blocks(reversed(blocks))  # the last one is the first to be given to others

    def evict(self, block_ids: set[int]) -> None:
        """Has the cache forget blocks: one that is held once it is let go of, for its holders have no rows for it."""
        held = {each for each in block_ids if each in self._holders}
        self._to_evict |= held
        self._manager.evict_blocks(block_ids - held)


def name_blocks(request: Request, hashes: Sequence[bytes], block_size: int) -> int:
    """Gives the request's first blocks these names, and all that follow names that no other request has.

    What follows is of a reply's rows, which nothing names. Returns how many have these names.
    """
    own = os.urandom(HASH_BYTES)

    def new_names(request: Request) -> list[bytes]:
        full = request.num_tokens // block_size
        return [hashlib.sha256(own + i.to_bytes(8, "big")).digest() for i in range(len(request.block_hashes), full)]

    request.block_hashes = list(hashes[: request.num_prompt_tokens // block_size])  # type: ignore[arg-type]
    named = len(request.block_hashes)
    request._block_hasher = new_names  # type: ignore[assignment]
    request.update_block_hashes()
    return named


def forget_reply(manager: KVCacheManager, request_id: str, named: int) -> None:
    """Takes the blocks behind the first `named` ones of a request that ends out of the cache: none can ask for them.

    Else they would be kept as long as prompts are, and in their place.
    """
    for ids in manager.get_block_ids(request_id):
        manager.block_pool.evict_blocks(set(ids[named:]))


def can_be_told(request: Request) -> bool:
    """Whether the names of its blocks have the length that travels: those of vLLM's faster hashes have not."""
    return all(len(each) == HASH_BYTES for each in request.block_hashes[:1])


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
