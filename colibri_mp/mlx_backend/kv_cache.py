"""What is kept of positions and sequences on the device.

Paged caches: for each layer and each thing that its mixer keeps, blocks of 16 positions in one `mx.array`.

Keys and values are [num_blocks, 16, kv heads, head_dim]. A step scatters its rows in, which MLX does in place, and gathers the blocks
of a sequence, which copies them: the table of blocks stays the caller's (`Batch.block_table`), as with the compiled kernels.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, num_blocks_for
from colibri_mp.mlx_backend.device import to_device, to_host

Bytes = NDArray[np.uint8]
I32Array = NDArray[np.int32]


class PagedArray:
    """Float32 rows of one shape, one for each position."""

    def __init__(self, num_blocks: int, row_shape: tuple[int, ...]) -> None:
        self._blocks = mx.zeros((num_blocks, BLOCK_TOKENS, *row_shape))
        mx.eval(self._blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self._blocks.nbytes // self._blocks.shape[0])

    def write(self, blocks: I32Array, positions: I32Array, rows: mx.array) -> None:
        """Store rows [T, ...] at `positions` [T] of their sequences, in these blocks [T]."""
        self._blocks[to_device(blocks), to_device(positions % BLOCK_TOKENS)] = rows

    def read(self, block_ids: I32Array, first: int, end: int) -> mx.array:
        """The rows of the positions first ... end of a sequence [end - first, ...]; `block_ids`: its row of the block table."""
        first_block = first // BLOCK_TOKENS
        found = self._blocks[to_device(block_ids[first_block : num_blocks_for(end)])]
        rows = found.reshape(-1, *found.shape[2:])
        start = first_block * BLOCK_TOKENS
        return rows[first - start : end - start]

    def copy_block(self, block: int) -> Bytes:
        """A block's rows, uint8 [block_bytes]."""
        return np.array(to_host(self._blocks[block])).reshape(-1).view(np.uint8)

    def set_block(self, block: int, data: Bytes) -> None:
        """The inverse of `copy_block`."""
        self._blocks[block] = to_device(data.view(np.float32)).reshape(self._blocks.shape[1:])
        mx.eval(self._blocks)


class SlotArray:
    """Float32 arrays of one shape, one for each slot of recurrent states."""

    def __init__(self, num_slots: int, shape: tuple[int, ...]) -> None:
        self._slots = mx.zeros((num_slots, *shape))
        mx.eval(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return int(self._slots.nbytes // self._slots.shape[0])

    def read(self, slot: int) -> mx.array:
        """What a slot holds; zeros for a slot below 0."""
        return self._slots[slot] if slot >= 0 else mx.zeros(self._slots.shape[1:])

    def write(self, slot: int, values: mx.array) -> None:
        """Put it there."""
        self._slots[slot] = values

    def copy_slot(self, slot: int) -> Bytes:
        """The same, as uint8 [slot_bytes]."""
        return np.array(to_host(self._slots[slot])).reshape(-1).view(np.uint8)

    def set_slot(self, slot: int, data: Bytes) -> None:
        """The inverse of `copy_slot`."""
        self._slots[slot] = to_device(data.view(np.float32)).reshape(self._slots.shape[1:])
        mx.eval(self._slots)


class MlxSlots:
    """The recurrent states of all layers as one, by slot. Implements `backend.Slots`; without recurrent layers there are no slots."""

    def __init__(self, arrays: Sequence[SlotArray], num_slots: int) -> None:
        self._arrays = tuple(arrays)
        self.num_slots = num_slots if arrays else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in all layers."""
        return sum(array.slot_bytes for array in self._arrays)

    def copy_slot(self, slot: int) -> Bytes:
        """What a slot holds, uint8 [slot_bytes]."""
        return np.concatenate([array.copy_slot(slot) for array in self._arrays])

    def set_slot(self, slot: int, data: Bytes) -> None:
        """The inverse of `copy_slot`."""
        start = 0
        for array in self._arrays:
            array.set_slot(slot, data[start : start + array.slot_bytes].copy())
            start += array.slot_bytes


class MlxBlocks:
    """The paged arrays of all layers as one: block `i` is block `i` of each. Implements `backend.Blocks`."""

    def __init__(self, arrays: Sequence[PagedArray], num_blocks: int) -> None:
        self.num_blocks, self.bits = num_blocks, 32
        self._arrays = tuple(arrays)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in all layers."""
        return sum(array.block_bytes for array in self._arrays)

    def copy_block(self, block: int) -> Bytes:
        """All that is cached for the 16 positions of a block, uint8 [block_bytes]."""
        return np.concatenate([array.copy_block(block) for array in self._arrays])

    def set_block(self, block: int, data: Bytes) -> None:
        """The inverse of `copy_block`."""
        start = 0
        for array in self._arrays:
            array.set_block(block, data[start : start + array.block_bytes].copy())
            start += array.block_bytes


def paged_bytes(num_tokens: int, row_elements: int) -> int:
    """Bytes of a `PagedArray` for so many positions, for the memory plan."""
    return 4 * num_blocks_for(num_tokens) * BLOCK_TOKENS * row_elements
