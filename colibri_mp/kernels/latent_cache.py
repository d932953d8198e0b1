"""The paged cache of multi-head latent attention: for each position its latent vector and its rope key, which all heads read.

The latent is key and value in one, so it is stored once. For one layer and block there is a *tile*
(P = latent + rope elements, rounded up to whole vectors):

    rows     [P / 16][16 positions][16 elements]    a vector is 16 elements of one position
    scales   float32 [2][16 positions]              only in 8 bits: of the latents, of the rope keys
    index    float32 [index_dim][16 positions]      only in layers with an indexer: its keys (`index_keys`)

Values are read as they lie; for scores a tile is turned to [P][16 positions] on its way (`mla_core`), which costs a few percent of
them, since all heads share it. In 8 bits (lossy) rows are int8, code and scale as in `kv_cache8`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.index_keys import IndexKeys, index_tile_bytes
from colibri_mp.kernels.kv_cache import F32Array
from colibri_mp.kernels.kv_cache8 import quantise
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, PagedCache, num_blocks_for


def padded(width: int) -> int:
    """A width rounded up to whole vectors."""
    return -(-width // BLOCK_TOKENS) * BLOCK_TOKENS


class LatentCache(PagedCache):
    """`tiles` is float32 [num_layers, num_blocks, 1, tile]."""

    def __init__(self, num_layers: int, num_blocks: int, latent_dim: int, rope_dim: int, index_dim: int = 0) -> None:
        self.latent_dim, self.rope_dim, self.index_dim = latent_dim, rope_dim, index_dim
        super().__init__(num_layers, num_blocks, 1, self.tile_bytes(latent_dim, rope_dim, index_dim))

    @property
    def index_keys(self) -> IndexKeys:
        """The keys of an indexer."""
        return IndexKeys(self, self.tile_bytes(self.latent_dim, self.rope_dim), self.index_dim)

    @classmethod
    def tile_bytes(cls, latent_dim: int, rope_dim: int, index_dim: int = 0) -> int:
        """Bytes of one layer and block."""
        return cls.row_bytes(padded(latent_dim + rope_dim)) * BLOCK_TOKENS + index_tile_bytes(index_dim)

    @staticmethod
    def row_bytes(width: int) -> int:
        """Bytes of a padded row, with its scales."""
        return 4 * width

    def write(self, layer_idx: int, block_ids: Any, start: int, latents: F32Array, rope_keys: F32Array) -> None:
        """Store latents [n, latent_dim] and rope keys [n, rope_dim] at the positions from `start` on. Plain numpy."""
        for position, (latent, key) in enumerate(zip(latents, rope_keys, strict=True), start):
            self._store(layer_idx, block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS, latent, key)

    def read(self, layer_idx: int, block_ids: Any, num_tokens: int) -> tuple[F32Array, F32Array]:
        """Latents [n, latent_dim] and rope keys [n, rope_dim] of the positions 0 .. n - 1, float32 copies. Plain numpy."""
        rows = self._values(layer_idx)[np.asarray(block_ids)[: num_blocks_for(num_tokens)]]
        rows = rows.transpose(0, 2, 1, 3).reshape(len(rows) * BLOCK_TOKENS, -1)[:num_tokens]
        end = self.latent_dim + self.rope_dim
        return rows[:, : self.latent_dim].copy(), rows[:, self.latent_dim : end].copy()

    def _store(self, layer_idx: int, block: int, lane: int, latent: F32Array, rope_key: F32Array) -> None:
        self._rows(layer_idx)[block, :, lane] = self._row(latent, rope_key)

    def _row(self, latent: NDArray[Any], rope_key: NDArray[Any]) -> NDArray[Any]:
        """A position's row, padded: [P / 16, 16]."""
        row = np.zeros(padded(self.latent_dim + self.rope_dim), latent.dtype)
        row[: self.latent_dim + self.rope_dim] = np.concatenate([latent, rope_key])
        return row.reshape(-1, BLOCK_TOKENS)

    def _rows(self, layer_idx: int) -> NDArray[Any]:
        """View [num_blocks, P / 16, 16 positions, 16 elements]."""
        rows = self.tiles[layer_idx, :, 0, : padded(self.latent_dim + self.rope_dim) * BLOCK_TOKENS]
        return rows.reshape(self.num_blocks, -1, BLOCK_TOKENS, BLOCK_TOKENS)

    def _values(self, layer_idx: int) -> F32Array:
        """As `_rows`, as float32."""
        return self._rows(layer_idx)


class LatentCache8(LatentCache):
    """As `LatentCache`; `tiles` is uint8 [num_layers, num_blocks, 1, bytes of a tile]."""

    bits = 8
    dtype = np.dtype(np.uint8)

    @staticmethod
    def row_bytes(width: int) -> int:
        """Bytes of a padded row, with its scales."""
        return width + 2 * 4

    def _store(self, layer_idx: int, block: int, lane: int, latent: F32Array, rope_key: F32Array) -> None:
        scales = self._scales(layer_idx)
        codes, scales[block, 0, lane] = quantise(latent)
        key_codes, scales[block, 1, lane] = quantise(rope_key)
        self._rows(layer_idx)[block, :, lane] = self._row(codes, key_codes)

    def _rows(self, layer_idx: int) -> NDArray[np.int8]:
        codes = self.tiles[layer_idx, :, 0, : padded(self.latent_dim + self.rope_dim) * BLOCK_TOKENS].view(np.int8)
        return codes.reshape(self.num_blocks, -1, BLOCK_TOKENS, BLOCK_TOKENS)

    def _scales(self, layer_idx: int) -> F32Array:
        """View [num_blocks, 2, 16 positions]."""
        start = padded(self.latent_dim + self.rope_dim) * BLOCK_TOKENS
        scales = self.tiles[layer_idx, :, 0, start : start + 2 * 4 * BLOCK_TOKENS]
        return scales.view(np.float32).reshape(-1, 2, BLOCK_TOKENS)

    def _values(self, layer_idx: int) -> F32Array:
        rows, scales = self._rows(layer_idx).astype(np.float32), self._scales(layer_idx)
        is_key = np.arange(rows.shape[1] * BLOCK_TOKENS).reshape(-1, 1, BLOCK_TOKENS) >= self.latent_dim
        return np.where(is_key, scales[:, 1][:, None, :, None], scales[:, 0][:, None, :, None]) * rows


LATENT_CACHES: dict[int, type[LatentCache]] = {32: LatentCache, 8: LatentCache8}
"""By `--kv-bits`."""
