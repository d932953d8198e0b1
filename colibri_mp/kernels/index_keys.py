"""Where an indexer's keys lie in a paged cache: float32, [head_dim][16 positions] in each tile of a block, `offset` bytes from its start.

The cache is that of the attention which the indexer serves; a layer without an indexer has tiles without these keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, PagedCache, num_blocks_for

F32Array = NDArray[np.float32]


def index_tile_bytes(head_dim: int) -> int:
    """Bytes of a block's keys in one layer."""
    return head_dim * BLOCK_TOKENS * 4


@dataclass(frozen=True)
class IndexKeys:
    """The keys in a cache with one tile for each block and layer."""

    cache: PagedCache
    offset: int
    head_dim: int

    @property
    def tile_bytes(self) -> int:
        """Bytes from one block's keys to the next."""
        return self.cache.tiles.strides[1]

    def address(self, layer_idx: int) -> int:
        """Address of the keys of a layer's block 0, for compiled code; valid as long as the cache."""
        return self.cache.address(layer_idx) + self.offset

    def write(self, layer_idx: int, block_ids: Any, start: int, keys: F32Array) -> None:
        """Store keys, float32 [n, head_dim], at the positions from `start` on. Plain numpy, for tests."""
        for position, key in enumerate(keys, start):
            self._tiles(layer_idx)[block_ids[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = key

    def read(self, layer_idx: int, block_ids: Any, num_tokens: int) -> F32Array:
        """Keys of the positions 0 .. num_tokens - 1, float32 [n, head_dim], a copy. Plain numpy."""
        ids = np.asarray(block_ids)[: num_blocks_for(num_tokens)]
        keys: F32Array = self._tiles(layer_idx)[ids].transpose(0, 2, 1).reshape(-1, self.head_dim)
        return keys[:num_tokens].copy()

    def _tiles(self, layer_idx: int) -> F32Array:
        """View [num_blocks, head_dim, 16]."""
        tiles = self.cache.tiles.view(np.uint8)[layer_idx, :, 0]
        wanted = tiles[:, self.offset : self.offset + index_tile_bytes(self.head_dim)]
        return wanted.view(np.float32).reshape(self.cache.num_blocks, self.head_dim, BLOCK_TOKENS)
