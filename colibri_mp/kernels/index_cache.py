"""The paged cache of an indexer's keys: float32, one tile [head_dim][16 positions] for each layer and block of 16 positions.

A block id means the same 16 positions as in the cache of keys and values. Only layers that have an indexer have keys here.
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import MemoryPlanError
from colibri_mp.kernels.kv_cache import BLOCK_TOKENS, num_blocks_for

F32Array = NDArray[np.float32]


class IndexCache:
    """Index keys of `num_blocks` blocks for `num_layers` layers.

    `tiles` is float32 [num_layers, num_blocks, head_dim, 16], 64-aligned, zero at first, owned by this object.
    """

    bits: ClassVar[int] = 32

    def __init__(self, num_layers: int, num_blocks: int, head_dim: int) -> None:
        self.num_layers, self.num_blocks, self.head_dim = num_layers, num_blocks, head_dim
        num_bytes = self.nbytes(num_layers, num_blocks, head_dim)
        try:
            self._memory: NDArray[np.uint8] = np.zeros(num_bytes + 64, np.uint8)
        except MemoryError as error:
            raise MemoryPlanError(f"no memory for index keys of {num_bytes} bytes") from error
        start = -self._memory.ctypes.data % 64
        values = self._memory[start : start + num_bytes].view(np.float32)
        self.tiles: F32Array = values.reshape(num_layers, num_blocks, head_dim, BLOCK_TOKENS)
        self._address, self._layer_bytes = int(self.tiles.ctypes.data), self.tiles.strides[0]

    @staticmethod
    def nbytes(num_layers: int, num_blocks: int, head_dim: int) -> int:
        """Bytes that such a cache takes, for the memory plan."""
        return num_layers * num_blocks * head_dim * BLOCK_TOKENS * 4

    def address(self, layer_idx: int) -> int:
        """Address of a layer's first tile, for compiled code; valid as long as this object."""
        return self._address + layer_idx * self._layer_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: its tiles of all layers."""
        return self.nbytes(self.num_layers, 1, self.head_dim)

    def copy_block(self, block: int) -> NDArray[np.uint8]:
        """All tiles of a block, [num_layers][tile], as uint8 [block_bytes]."""
        return np.ascontiguousarray(self.tiles[:, block]).reshape(-1).view(np.uint8)

    def set_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_block`."""
        self.tiles[:, block] = data.view(np.float32).reshape(self.tiles[:, block].shape)

    def write(self, layer_idx: int, block_ids: Any, start: int, keys: F32Array) -> None:
        """Store keys, float32 [n, head_dim], at the positions from `start` on. Plain numpy, for tests."""
        for position, key in enumerate(keys, start):
            self.tiles[layer_idx, block_ids[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = key

    def read(self, layer_idx: int, block_ids: Any, num_tokens: int) -> F32Array:
        """Keys of the positions 0 .. num_tokens - 1, float32 [n, head_dim], a copy. Plain numpy."""
        ids = np.asarray(block_ids)[: num_blocks_for(num_tokens)]
        keys: F32Array = self.tiles[layer_idx, ids].transpose(0, 2, 1).reshape(-1, self.head_dim)
        return keys[:num_tokens].copy()
