"""The key-value cache in 8 bits: int8 codes, and one float32 scale for each position and head, of keys and of values. Lossy.

A tile is, in bytes (P = head_dim rounded up to 16):

    keys          int8 [head_dim][16 positions]
    key scales    float32 [16 positions]
    values        int8 [P / 16][16 positions][16 elements]
    value scales  float32 [16 positions]

code = round(x * (127 / largest)), half to even, and x is taken as code * (largest / 127), where `largest` is the greatest
absolute value of the position and head: what a position is stored as depends on that position alone. A quarter of the bytes of
float32, and a few more.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.kv_cache import F32Array, KVCache, padded_head_dim
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, num_blocks_for

_SCALES_BYTES = 4 * BLOCK_TOKENS


def quantise(rows: F32Array) -> tuple[NDArray[np.int8], F32Array]:
    """Codes int8 [..., n] and scales float32 [...] of float32 [..., n]; all zero where a row is."""
    largest = np.abs(rows).max(axis=-1)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, np.float32(1)), np.float32(0))
    codes = np.rint(rows * inverse.astype(np.float32)[..., None])
    return codes.astype(np.int8), (largest / np.float32(127)).astype(np.float32)


class KVCache8(KVCache):
    """As `KVCache`; `tiles` is uint8 [num_layers, num_blocks, num_kv_heads, bytes of a tile]."""

    bits = 8
    dtype = np.dtype(np.uint8)

    @staticmethod
    def values_offset(head_dim: int) -> int:
        """Bytes of a tile before its values."""
        return head_dim * BLOCK_TOKENS + _SCALES_BYTES

    @staticmethod
    def tile_bytes(head_dim: int) -> int:
        """Bytes of one layer, one block, one key-value head."""
        return (head_dim + padded_head_dim(head_dim)) * BLOCK_TOKENS + 2 * _SCALES_BYTES

    def _store(self, layer_idx: int, block: int, lane: int, key: F32Array, value: F32Array) -> None:
        keys, key_scales, values, value_scales = self._parts(layer_idx)
        keys[block, :, :, lane], key_scales[block, :, lane] = quantise(key)
        codes, value_scales[block, :, lane] = quantise(value)
        padded = np.zeros((self.num_kv_heads, padded_head_dim(self.head_dim)), np.int8)
        padded[:, : self.head_dim] = codes
        values[block, :, :, lane, :] = padded.reshape(self.num_kv_heads, -1, BLOCK_TOKENS)

    def read(self, layer_idx: int, block_ids: Any, num_tokens: int) -> tuple[F32Array, F32Array]:
        """What the codes stand for, as `KVCache.read`."""
        ids = np.asarray(block_ids)[: num_blocks_for(num_tokens)]
        keys, key_scales, values, value_scales = (part[ids] for part in self._parts(layer_idx))
        keys = keys.transpose(0, 3, 1, 2) * key_scales.transpose(0, 2, 1)[..., None]
        values = values.transpose(0, 3, 1, 2, 4) * value_scales.transpose(0, 2, 1)[..., None, None]
        keys = keys.reshape(-1, self.num_kv_heads, self.head_dim)
        values = values.reshape(-1, self.num_kv_heads, padded_head_dim(self.head_dim))[:, :, : self.head_dim]
        return keys[:num_tokens].copy(), values[:num_tokens].copy()

    def _parts(self, layer_idx: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Views of a layer's keys, key scales, values and value scales, each [num_blocks, num_kv_heads, ...]."""
        tiles, middle, end = self.tiles[layer_idx], self.values_offset(self.head_dim), self.tile_bytes(self.head_dim)
        keys = tiles[:, :, : middle - _SCALES_BYTES].view(np.int8)
        values = tiles[:, :, middle : end - _SCALES_BYTES].view(np.int8)
        shape = (self.num_blocks, self.num_kv_heads)
        return (
            keys.reshape(*shape, self.head_dim, BLOCK_TOKENS),
            tiles[:, :, middle - _SCALES_BYTES : middle].view(np.float32),
            values.reshape(*shape, -1, BLOCK_TOKENS, BLOCK_TOKENS),
            tiles[:, :, end - _SCALES_BYTES :].view(np.float32),
        )


CACHES: dict[int, type[KVCache]] = {32: KVCache, 8: KVCache8}
"""By `--kv-bits`."""
