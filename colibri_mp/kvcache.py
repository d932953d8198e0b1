"""Bookkeeping of KV-cache blocks: ids, counts and keys only, no arrays (those are in `kernels.kv_cache`).

A block holds the keys and values of a fixed number of positions of one sequence, in all layers. Blocks are reserved for
a request's whole projected length before it starts, so a running request never runs out in the middle.

    free ── acquire ──▶ held by one sequence ── publish, once full ──▶ held and cached ── acquire, adopt ──▶ held by several
      ▲                          │ release                                    │ release by the last
      └──────────────────────────┘◀────────────── evict ──────────────── idle and cached

A *cached* block can be found by its content: its key is a hash of its parent's key and its own token ids (`PrefixKeys`), so
equal keys mean equal tokens from the first position on, and that means equal bits. It is never written again.
"""

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from colibri_mp.errors import RequestError

_NO_PARENT = -1


class PrefixKeys:
    """Names of full blocks by what they hold; `root` tells apart everything else that the values depend on (model, format)."""

    def __init__(self, root: str, block_tokens: int) -> None:
        self._root = hashlib.sha256(root.encode()).digest()
        self._block_tokens = block_tokens

    def extend(self, keys: list[bytes], token_ids: Sequence[int], num_blocks: int) -> None:
        """Append to `keys`, those of the first blocks of `token_ids`, until there are `num_blocks`."""
        for idx in range(len(keys), num_blocks):
            block = token_ids[idx * self._block_tokens : (idx + 1) * self._block_tokens]
            parent = keys[-1] if keys else self._root
            keys.append(hashlib.sha256(parent + np.array(block, "<i4").tobytes()).digest())


@dataclass(slots=True)
class _Cached:
    """A block that can be found: `parent` is the block before it, `num_children` cached blocks come after it."""

    key: bytes
    parent: int
    num_children: int = 0
    last_use: int = 0


class BlockAllocator:
    """Hands out block ids 0 .. num_blocks - 1, each to one sequence, or to several that share its content."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_evicted = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._cached: dict[int, _Cached] = {}
        self._block_of: dict[bytes, int] = {}
        self._num_idle = 0  # cached blocks that nobody holds
        self._leaves: list[tuple[int, int]] = []  # heap of (last use, block), with entries that have become untrue
        self._num_releases = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; the cached ones among them give way when they are needed."""
        return len(self._free) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, held or not."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` positions take."""
        return -(-num_tokens // self.block_tokens)

    def check(self, num_tokens: int) -> None:
        """Whether a request of `num_tokens` can ever run.

        Raises:
            RequestError: it is longer than the whole cache.
        """
        if self.blocks_for(num_tokens) > self.num_blocks:
            raise RequestError(
                f"the request needs KV memory for {num_tokens} tokens, the cluster has it for "
                f"{self.num_blocks * self.block_tokens}; launch with a larger --kv-tokens or ask for less"
            )

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `keys`; nobody holds them for the caller."""
        found = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def acquire(self, num_tokens: int, keys: Iterable[bytes] = ()) -> tuple[list[int], int] | None:
        """Blocks for `num_tokens` positions and how many of them, the first, are cached ones of `keys`.

        None if too few are free now. `keys` must be of fewer blocks than `num_tokens` takes.
        """
        found = self.find(keys)
        num_new = self.blocks_for(num_tokens) - len(found)
        if num_new > self.num_free - sum(not self._num_holders[block] for block in found):
            return None
        for block in found:
            self._hold(block)
        return found + [self._take_new() for _ in range(num_new)], len(found)

    def most_holdable(self, keys: Iterable[bytes]) -> int:
        """How many blocks that begin with the cached ones of `keys` could be acquired now."""
        return self.num_free + sum(self._num_holders[block] > 0 for block in self.find(keys))

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; `blocks` is emptied. Cached ones can still be found until their memory is needed."""
        self._num_releases += 1
        while blocks:
            self._let_go(blocks.pop())

    # -- sharing -------------------------------------------------------------------------------------------------------

    def publish(self, blocks: list[int], idx: int, key: bytes) -> None:
        """The block at `idx` is full and computed: let it be found. Those before it must have been published.

        Where its content is cached already, that block takes its place and it is freed.
        """
        block = blocks[idx]
        if self.adopt(blocks, idx, key):
            return
        parent = blocks[idx - 1] if idx else _NO_PARENT
        if parent != _NO_PARENT:
            self._cached[parent].num_children += 1
        self._cached[block] = _Cached(key, parent)
        self._block_of[key] = block

    def adopt(self, blocks: list[int], idx: int, key: bytes) -> bool:
        """Put the cached block of `key`, if there is one, in the place of the block at `idx`."""
        known = self._block_of.get(key)
        if known is None:
            return False
        if known != blocks[idx]:
            self._hold(known)
            self._let_go(blocks[idx])
            blocks[idx] = known
        return True

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _hold(self, block: int) -> None:
        self._num_idle -= not self._num_holders[block]
        self._num_holders[block] += 1

    def _take_new(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._num_holders[block] = 1
        return block

    def _let_go(self, block: int) -> None:
        self._num_holders[block] -= 1
        cached = self._cached.get(block)
        if cached is not None:
            cached.last_use = self._num_releases
        if self._num_holders[block]:
            return
        if cached is None:
            self._free.append(block)
        else:
            self._num_idle += 1
            self._note_leaf(block, cached)

    def _note_leaf(self, block: int, cached: _Cached) -> None:
        """Remember a block that may be evicted: nobody holds it and no cached block needs it."""
        if cached.num_children or self._num_holders[block]:
            return
        if len(self._leaves) > 4 * self.num_blocks:
            self._leaves = sorted({entry for entry in self._leaves if self._is_leaf(*entry)})
        heapq.heappush(self._leaves, (cached.last_use, block))

    def _is_leaf(self, last_use: int, block: int) -> bool:
        cached = self._cached.get(block)
        return cached is not None and not (
            self._num_holders[block] or cached.num_children or cached.last_use != last_use
        )

    def _evict(self) -> int:
        """Forget the leaf that was used least recently."""
        last_use, block = heapq.heappop(self._leaves)
        while not self._is_leaf(last_use, block):
            last_use, block = heapq.heappop(self._leaves)
        gone = self._cached.pop(block)
        del self._block_of[gone.key]
        self._num_idle -= 1
        self.num_evicted += 1
        if gone.parent != _NO_PARENT:
            parent = self._cached[gone.parent]
            parent.num_children -= 1
            self._note_leaf(gone.parent, parent)
        return block

    def check_integrity(self, held: list[list[int]]) -> None:
        """Assert that each block is free, idle or held as often as counted, and that what is cached hangs together."""
        holders = [0] * self.num_blocks
        for block in (block for blocks in held for block in blocks):
            holders[block] += 1
        assert holders == self._num_holders, "KV blocks held by nobody, or more often than counted"
        idle = [block for block in self._cached if not holders[block]]
        in_use = [block for block in range(self.num_blocks) if holders[block]]
        assert sorted(self._free + idle + in_use) == list(range(self.num_blocks)), "KV blocks lost or held twice"
        assert len(idle) == self._num_idle
        assert self._block_of == {cached.key: block for block, cached in self._cached.items()}
        num_children = dict.fromkeys(self._cached, 0)
        for block, cached in self._cached.items():
            if cached.parent != _NO_PARENT:
                num_children[cached.parent] += 1
                assert holders[cached.parent] >= holders[block], "a cached block is held without its parent"
        assert num_children == {block: cached.num_children for block, cached in self._cached.items()}
        leaves = {block for block in idle if not num_children[block]}
        assert leaves == {block for last_use, block in self._leaves if self._is_leaf(last_use, block)}
