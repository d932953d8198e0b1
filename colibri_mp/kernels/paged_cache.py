"""What all paged caches have in common: blocks of 16 positions, in tiles that compiled code finds by address.

A *block* holds BLOCK_TOKENS positions of one sequence. Each kind of mixer keeps what it needs of them in a cache of its own shape
(`kv_cache`: keys and values), which holds the layers that have this shape; a block id means the same positions in all of them.
Which sequence owns which block is the caller's business (`Batch.block_table`); a cache only stores.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import MemoryPlanError

BLOCK_TOKENS = 16
"""Positions a block, and lanes of a vector: fixed."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


class PagedCache:
    """Tiles of `num_blocks` blocks for `num_layers` layers, `num_heads` tiles of `tile_bytes` for each.

    `tiles` is `dtype` [num_layers, num_blocks, num_heads, tile], 64-aligned, zero at first, owned by this object. Values that a
    former owner of a block left are never read: a sequence reads positions that it has written itself.
    """

    bits: ClassVar[int] = 32
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    def __init__(self, num_layers: int, num_blocks: int, num_heads: int, tile_bytes: int) -> None:
        self.num_layers, self.num_blocks = num_layers, num_blocks
        num_bytes = num_layers * num_blocks * num_heads * tile_bytes
        try:
            self._memory: NDArray[np.uint8] = np.zeros(num_bytes + 64, np.uint8)
        except MemoryError as error:
            raise MemoryPlanError(f"no memory for a KV cache of {num_bytes} bytes") from error
        start = -self._memory.ctypes.data % 64
        values = self._memory[start : start + num_bytes].view(self.dtype)
        self.tiles: NDArray[Any] = values.reshape(num_layers, num_blocks, num_heads, -1)
        self._address, self._layer_bytes = int(self.tiles.ctypes.data), self.tiles.strides[0]

    @property
    def num_tokens(self) -> int:
        """Positions that fit, of all sequences together."""
        return self.num_blocks * BLOCK_TOKENS

    def address(self, layer_idx: int) -> int:
        """Address of a layer's first tile, for compiled code; valid as long as this object."""
        return self._address + layer_idx * self._layer_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: its tiles of all layers and heads."""
        return self.tiles.nbytes // self.num_blocks

    def copy_block(self, block: int) -> NDArray[np.uint8]:
        """All tiles of a block, [num_layers][num_heads][tile], as uint8 [block_bytes]."""
        return np.ascontiguousarray(self.tiles[:, block]).reshape(-1).view(np.uint8)

    def set_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_block`."""
        self.tiles[:, block] = data.view(self.tiles.dtype).reshape(self.tiles[:, block].shape)


class PagedCaches:
    """The caches of a model as one: block `i` is block `i` of each of them. `bits`: of `--kv-bits`."""

    def __init__(self, caches: Sequence[PagedCache], num_blocks: int, bits: int) -> None:
        assert all(cache.num_blocks == num_blocks for cache in caches)
        self.num_blocks, self.bits, self._caches = num_blocks, bits, tuple(caches)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all caches."""
        return sum(cache.block_bytes for cache in self._caches)

    def copy_block(self, block: int) -> NDArray[np.uint8]:
        """A block of all caches, one after the other, as uint8 [block_bytes]."""
        return np.concatenate([cache.copy_block(block) for cache in self._caches])

    def set_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_block`."""
        start = 0
        for cache in self._caches:
            cache.set_block(block, data[start : start + cache.block_bytes])
            start += cache.block_bytes
