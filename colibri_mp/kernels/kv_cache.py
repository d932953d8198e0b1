"""The paged key-value cache: float32 (in 8 bits: `kv_cache8`), blocks of 16 positions, laid out for vectors.

A *block* holds BLOCK_TOKENS positions of one sequence for all layers and key-value heads of a worker. For one layer, block and
head there is one *tile* of consecutive floats (P = head_dim rounded up to 16):

    keys    [head_dim][16 positions]               a vector is 16 positions of one element: scores need no horizontal sum
    values  [P / 16][16 positions][16 elements]    a vector is 16 elements of one position

Which sequence owns which block is the caller's business (`Batch.block_table`); the cache only stores.
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import MemoryPlanError

BLOCK_TOKENS = 16
"""Positions a block, and lanes of a vector: fixed."""

F32Array = NDArray[np.float32]


def padded_head_dim(head_dim: int) -> int:
    """head_dim rounded up to whole vectors."""
    return -(-head_dim // BLOCK_TOKENS) * BLOCK_TOKENS


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


class KVCache:
    """Keys and values of `num_blocks` blocks for `num_layers` layers.

    `tiles` is float32 [num_layers, num_blocks, num_kv_heads, tile], 64-aligned, zero at first, owned by this object. Values that a
    former owner of a block left are never read: a sequence reads positions that it has written itself.
    """

    bits: ClassVar[int] = 32
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    def __init__(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_layers, self.num_blocks = num_layers, num_blocks
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        num_bytes = self.nbytes(num_layers, num_blocks, num_kv_heads, head_dim)
        try:
            self._memory: NDArray[np.uint8] = np.zeros(num_bytes + 64, np.uint8)
        except MemoryError as error:
            raise MemoryPlanError(f"no memory for a KV cache of {num_bytes} bytes") from error
        start = -self._memory.ctypes.data % 64
        values = self._memory[start : start + num_bytes].view(self.dtype)
        self.tiles: NDArray[Any] = values.reshape(num_layers, num_blocks, num_kv_heads, -1)
        self._address, self._layer_bytes = int(self.tiles.ctypes.data), self.tiles.strides[0]

    @staticmethod
    def tile_bytes(head_dim: int) -> int:
        """Bytes of one tile: one layer, one block, one key-value head."""
        return 4 * (head_dim + padded_head_dim(head_dim)) * BLOCK_TOKENS

    @staticmethod
    def values_offset(head_dim: int) -> int:
        """Bytes of a tile before its values."""
        return 4 * head_dim * BLOCK_TOKENS

    @classmethod
    def nbytes(cls, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that such a cache takes, for the memory plan."""
        return num_layers * num_blocks * num_kv_heads * cls.tile_bytes(head_dim)

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
        """All tiles of a block, [num_layers][num_kv_heads][tile], as uint8 [block_bytes]."""
        return np.ascontiguousarray(self.tiles[:, block]).reshape(-1).view(np.uint8)

    def set_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_block`."""
        self.tiles[:, block] = data.view(self.tiles.dtype).reshape(self.tiles[:, block].shape)

    def write(self, layer_idx: int, block_ids: Any, start: int, keys: F32Array, values: F32Array) -> None:
        """Store keys and values, float32 [n, num_kv_heads, head_dim], at the positions from `start` on. Plain numpy, for tests."""
        for position, (key, value) in enumerate(zip(keys, values, strict=True), start):
            self._store(layer_idx, block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS, key, value)

    def _store(self, layer_idx: int, block: int, lane: int, key: F32Array, value: F32Array) -> None:
        """One position, [num_kv_heads, head_dim] each."""
        self._keys(layer_idx)[block, :, :, lane] = key
        padded = np.zeros((self.num_kv_heads, padded_head_dim(self.head_dim)), np.float32)
        padded[:, : self.head_dim] = value
        self._values(layer_idx)[block, :, :, lane, :] = padded.reshape(self.num_kv_heads, -1, BLOCK_TOKENS)

    def read(self, layer_idx: int, block_ids: Any, num_tokens: int) -> tuple[F32Array, F32Array]:
        """Keys and values of the positions 0 .. num_tokens - 1, float32 [n, num_kv_heads, head_dim] copies. Plain numpy."""
        ids = np.asarray(block_ids)[: num_blocks_for(num_tokens)]
        keys = self._keys(layer_idx)[ids].transpose(0, 3, 1, 2).reshape(-1, self.num_kv_heads, self.head_dim)
        values = self._values(layer_idx)[ids].transpose(0, 3, 1, 2, 4)
        values = values.reshape(-1, self.num_kv_heads, padded_head_dim(self.head_dim))[:, :, : self.head_dim]
        return keys[:num_tokens].copy(), values[:num_tokens].copy()

    def _keys(self, layer_idx: int) -> F32Array:
        """View [num_blocks, num_kv_heads, head_dim, BLOCK_TOKENS]."""
        size = self.head_dim * BLOCK_TOKENS
        tiles = self.tiles[layer_idx, :, :, :size]
        return tiles.reshape(self.num_blocks, self.num_kv_heads, self.head_dim, BLOCK_TOKENS)

    def _values(self, layer_idx: int) -> F32Array:
        """View [num_blocks, num_kv_heads, P / 16, BLOCK_TOKENS, 16]."""
        tiles = self.tiles[layer_idx, :, :, self.head_dim * BLOCK_TOKENS :]
        return tiles.reshape(self.num_blocks, self.num_kv_heads, -1, BLOCK_TOKENS, BLOCK_TOKENS)
