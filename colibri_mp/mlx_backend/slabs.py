"""Slabs of the expert pools on their way to the device: from the kernels' packed form to MLX's rows.

A slab is packed in blocks of 16 rows, a vector lane a row (`kernels.layout`); MLX wants the words of a row one after the other.
So the way is a copy of the bytes and a transposition, made by the device itself:

    format                        on the device                                              bytes a value
    q4, q8 in groups of 32-128    the same codes, [rows, cols * bits / 32] words;            bits / 8 + 8 / group
                                  scales and biases as float32
    everything else               values as float32                                          4
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.formats import Format
from colibri_mp.kernels import layout, reference
from colibri_mp.kernels.layout import BLOCK_ROWS
from colibri_mp.mlx_backend.device import to_device
from colibri_mp.mlx_backend.matrices import GROUP_SIZES

Bytes = NDArray[np.uint8]
_CODE_BITS: dict[str, int] = {"q4": 4, "q8": 8}
_TYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}


@dataclass(frozen=True)
class SlabMatrix:
    """One matrix of a slab: its packed bytes are those from `offset` on."""

    format: Format
    rows: int
    cols: int
    offset: int

    @property
    def bits(self) -> int:
        """Bits of a code on the device; 0: float32 values."""
        kind, group_size, scale = self.format
        is_native = kind in _CODE_BITS and group_size in GROUP_SIZES and scale in _TYPES
        return _CODE_BITS[kind] if is_native else 0

    @property
    def device_bytes(self) -> int:
        """What it takes on the device."""
        if not self.bits:
            return 4 * self.rows * self.cols
        return self.rows * (self.cols * self.bits // 8 + 8 * (self.cols // self.format.group_size))

    def shapes(self) -> list[tuple[tuple[int, int], mx.Dtype]]:
        """Shape and type of each array that `unpack` gives."""
        if not self.bits:
            return [((self.rows, self.cols), mx.float32)]
        groups = ((self.rows, self.cols // self.format.group_size), mx.float32)
        return [((self.rows, self.cols * self.bits // 32), mx.uint32), groups, groups]

    def unpack(self, slab: Bytes) -> list[mx.array]:
        """Words, scales and biases of quantised matrices, else the values. The slab may change once they have been evaluated."""
        packed = slab[self.offset : self.offset + layout.packed_bytes(self.format, self.rows, self.cols)]
        if self.bits:
            return _grouped(self, packed)
        if self.format.group_size or self.format.kind not in _TYPES:
            return [to_device(reference.unpack(self.format, self.rows, self.cols, packed))]
        elements = to_device(packed.view(np.uint16 if self.format.kind != "f32" else np.uint32))
        columns = elements.view(_TYPES[self.format.kind]).reshape(layout.num_blocks(self.rows), -1, BLOCK_ROWS)
        values = columns.astype(mx.float32).transpose(0, 2, 1).reshape(-1, columns.shape[1])
        return [values[: self.rows, : self.cols]]


def _grouped(matrix: SlabMatrix, packed: Bytes) -> list[mx.array]:
    rows, group = matrix.rows, matrix.format.group_size
    sizes = layout.geometry(matrix.format, matrix.cols)
    num_words = group * matrix.bits // 32
    blocks = layout.num_blocks(rows)
    records = to_device(packed.view(np.uint32)).reshape(blocks, sizes.num_steps, -1)
    codes = records[:, :, : num_words * BLOCK_ROWS]
    words = codes.reshape(blocks, -1, num_words, BLOCK_ROWS)
    if matrix.bits == 8:
        words = _in_order(words)
    words = words.transpose(0, 3, 1, 2).reshape(blocks * BLOCK_ROWS, -1)
    factors = mx.contiguous(records[:, :, num_words * BLOCK_ROWS :]).view(_TYPES[matrix.format.scale])
    factors = factors.reshape(blocks, -1, 2, BLOCK_ROWS).transpose(2, 0, 3, 1).astype(mx.float32)
    scales, biases = factors.reshape(2, blocks * BLOCK_ROWS, -1)
    return [words[:rows], scales[:rows], biases[:rows]]


def _in_order(words: mx.array) -> mx.array:
    """Pairs of words [..., n, 16], the even and the odd ones of 8 columns, as two words of 4 columns each."""
    pairs = words.reshape(*words.shape[:-2], -1, 2, BLOCK_ROWS)
    even, odd = pairs[..., 0, :], pairs[..., 1, :]
    low = (even & 0xFF) | (odd & 0xFF) << 8 | (even & 0xFF00) << 8 | (odd & 0xFF00) << 16
    high = (even >> 16 & 0xFF) | (odd >> 16 & 0xFF) << 8 | (even >> 24) << 16 | (odd >> 24) << 24
    return mx.stack([low, high], axis=-2).reshape(words.shape)
