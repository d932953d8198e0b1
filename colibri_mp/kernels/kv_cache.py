"""The paged key-value cache: float32 (in 8 bits: `kv_cache8`), blocks of 16 positions, laid out for vectors.

For one layer, block (`paged_cache`) and key-value head there is one *tile* of consecutive floats (P = head_dim rounded up to 16):

    keys    [head_dim][16 positions]               a vector is 16 positions of one element: scores need no horizontal sum
    values  [P / 16][16 positions][16 elements]    a vector is 16 elements of one position
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, PagedCache, num_blocks_for

F32Array = NDArray[np.float32]


def padded_head_dim(head_dim: int) -> int:
    """head_dim rounded up to whole vectors."""
    return -(-head_dim // BLOCK_TOKENS) * BLOCK_TOKENS


class KVCache(PagedCache):
    """Keys and values of `num_blocks` blocks for `num_layers` layers; `tiles` is float32 [num_layers, num_blocks, num_kv_heads, tile]."""

    def __init__(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        super().__init__(num_layers, num_blocks, num_kv_heads, self.tile_bytes(head_dim))

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
