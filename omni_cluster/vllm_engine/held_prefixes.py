"""Blocks of the KV cache that are promised to requests, whose rows are not sent for what these blocks hold.

An engine that takes rows knows nothing of a prompt by its tokens, which are the same for all. Whoever makes the rows
names the prompt's blocks, and blocks of one name hold the same here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_cluster.payloads import HASH_BYTES, PrefixHashes

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request


class HeldPrefixes:
    """Cached blocks by the name of who is to read them: as long as they are held, no one else is given their memory.

    `max_blocks` at most, so that what is left is enough for the longest request: one that needs more waits for no
    block that a waiting one holds.
    """

    def __init__(self, manager: KVCacheManager, block_size: int, max_blocks: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._max_blocks = max(0, max_blocks)
        self._held: dict[str, list[KVCacheBlock]] = {}
        self.num_blocks = 0

    def hold(self, name: str, prefix: PrefixHashes) -> int:
        """Returns how many of the prompt's blocks, from the first on, are in the cache, and now held for `name`."""
        room = self._max_blocks - self.num_blocks
        if room <= 0 or prefix.block_size != self._block_size or not self._manager.enable_caching or name in self._held:
            return 0
        hashes: list[BlockHash] = list(prefix.hashes[:room])  # type: ignore[arg-type]
        groups, _, _ = self._manager.coordinator.find_longest_cache_hit(hashes, len(hashes) * self._block_size)
        if len(groups) != 1 or not groups[0]:  # layers of several kinds have caches of their own, and hits of others
            return 0
        (blocks,) = groups
        self._manager.block_pool.touch(blocks)
        self._held[name] = list(blocks)
        self.num_blocks += len(blocks)
        return len(blocks)

    def release(self, name: str) -> None:
        """Ignores who holds nothing."""
        blocks = self._held.pop(name, [])
        self.num_blocks -= len(blocks)
        self._manager.block_pool.free_blocks(reversed(blocks))  # the last one is the first to be given to others


def name_blocks(request: Request, hashes: Sequence[bytes], block_size: int) -> None:
    """Gives the request's first blocks these names, and all that follow names that no other request has.

    What follows is of a reply's rows, which nothing names.
    """
    own = os.urandom(HASH_BYTES)

    def new_names(request: Request) -> list[bytes]:
        full = request.num_tokens // block_size
        return [hashlib.sha256(own + i.to_bytes(8, "big")).digest() for i in range(len(request.block_hashes), full)]

    request.block_hashes = list(hashes[: request.num_prompt_tokens // block_size])  # type: ignore[arg-type]
    request._block_hasher = new_names  # type: ignore[assignment]
    request.update_block_hashes()
