"""Slabs of the expert pools on their way to the device: from the kernels' packed form to MLX's rows.

A slab is packed in blocks of 16 rows, a vector lane a row (`kernels.layout`); MLX wants the codes of a row one after the other.
So the way is a copy of the bytes and a transposition, made by the device itself:

    format                                    on the device                                            bits a value
    q2 ... q8 in groups of 32, 64 and 128     the same codes, scales and biases as float32             bits + 64 / group
    the same without biases, or by row        biases of -8 or -128 scales, scales for each group       bits + 64 / group
    fp4 with a byte a group (mxfp4, nvfp4)    as stored                                                4 + 8 / group
    fp8 with a byte a group (mxfp8)           as stored                                                8.25
    bf16, f16, f32, fp8 in tiles              values as float32                                        32
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
_TYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
_FLOAT_MODES = {("fp4", "e8m0"): "mxfp4", ("fp4", "e4m3"): "nvfp4", ("fp8", "e8m0"): "mxfp8"}


@dataclass(frozen=True)
class SlabMatrix:
    """One matrix of a slab: its packed bytes are those from `offset` on."""

    format: Format
    rows: int
    cols: int
    offset: int

    @property
    def mode(self) -> str:
        """How MLX calls what it is on the device; "": float32 values."""
        if layout.uses_groups(self.format) and self.format.kind != "fp4":
            return "affine" if self.format.group_size in GROUP_SIZES else ""
        return _FLOAT_MODES.get((self.format.kind, self.format.scale), "")

    @property
    def bits(self) -> int:
        """Bits of a code on the device."""
        return layout.code_bits(self.format)

    @property
    def device_bytes(self) -> int:
        """What it takes on the device."""
        return sum(dtype.size * rows * cols for (rows, cols), dtype in self.shapes())

    def shapes(self) -> list[tuple[tuple[int, int], mx.Dtype]]:
        """Shape and type of each array that `unpack` gives."""
        if not self.mode:
            return [((self.rows, self.cols), mx.float32)]
        words, groups = (self.rows, self.cols * self.bits // 32), (self.rows, self.cols // self.format.group_size)
        if self.mode == "affine":
            return [(words, mx.uint32), (groups, mx.float32), (groups, mx.float32)]
        return [(words, mx.uint32), (groups, mx.uint8)]

    def unpack(self, slab: Bytes) -> list[mx.array]:
        """Words of codes, scales and biases, or the values. The slab may change once they have been evaluated."""
        packed = slab[self.offset : self.offset + layout.packed_bytes(self.format, self.rows, self.cols)]
        if self.mode:
            found = _affine(self, packed) if self.mode == "affine" else _floats(self, packed)
        elif self.format.kind in _TYPES:
            found = [_elements(self, packed)]
        else:
            found = [to_device(reference.unpack(self.format, self.rows, self.cols, packed))]
        return [array[: self.rows, : shape[1]] for array, (shape, _) in zip(found, self.shapes(), strict=True)]


def _elements(matrix: SlabMatrix, packed: Bytes) -> mx.array:
    """Values of elements, padded in both directions."""
    stored = to_device(packed.view(np.uint32 if matrix.format.kind == "f32" else np.uint16))
    columns = stored.view(_TYPES[matrix.format.kind]).reshape(layout.num_blocks(matrix.rows), -1, BLOCK_ROWS)
    return columns.astype(mx.float32).transpose(0, 2, 1).reshape(-1, columns.shape[1])


def _affine(matrix: SlabMatrix, packed: Bytes) -> list[mx.array]:
    """Words, scales and biases of q2 ... q8, rows padded to blocks."""
    group, bits, blocks = matrix.format.group_size, matrix.bits, layout.num_blocks(matrix.rows)
    num_words = group * bits // 32
    whole = to_device(packed.view(np.uint32)).reshape(blocks, -1)
    end = -BLOCK_ROWS if matrix.format.scale == "row" else whole.shape[1]
    records = whole[:, :end].reshape(blocks, matrix.cols // group, -1)
    words = records[:, :, : num_words * BLOCK_ROWS].reshape(blocks, -1, num_words, BLOCK_ROWS)
    if bits != 4:
        words = _in_order(_units(words, bits))
    words = words.transpose(0, 3, 1, 2).reshape(blocks * BLOCK_ROWS, -1)
    factors = whole[:, end:] if matrix.format.scale == "row" else records[:, :, num_words * BLOCK_ROWS :]
    scales, biases = _scales_and_biases(matrix, mx.contiguous(factors))
    return [words if bits in (4, 8) else _narrow(words, bits), scales, biases]


def _scales_and_biases(matrix: SlabMatrix, factors: mx.array) -> tuple[mx.array, mx.array]:
    """[rows, groups] each, rows padded to blocks, of what a block or each of its records has beside codes."""
    blocks, scale, num_groups = factors.shape[0], matrix.format.scale, matrix.cols // matrix.format.group_size
    if scale in _TYPES:
        found = factors.view(_TYPES[scale]).reshape(blocks, -1, 2, BLOCK_ROWS).transpose(2, 0, 3, 1)
        scales, biases = found.astype(mx.float32).reshape(2, blocks * BLOCK_ROWS, -1)
        return scales, biases
    scales = factors.view(mx.float32).reshape(blocks, -1, BLOCK_ROWS).transpose(0, 2, 1)
    scales = mx.broadcast_to(scales, (blocks, BLOCK_ROWS, num_groups)).reshape(blocks * BLOCK_ROWS, num_groups)
    return scales, scales * -(2.0 ** (matrix.bits - 1))


def _floats(matrix: SlabMatrix, packed: Bytes) -> list[mx.array]:
    """Words and scales of FP4 and FP8 with a byte for each group, rows padded to blocks."""
    cols, blocks = matrix.cols, layout.num_blocks(matrix.rows)
    num_groups = cols // matrix.format.group_size
    scales, codes = _lines(
        to_device(packed.reshape(blocks, -1)), num_groups, 2 * matrix.format.group_size * matrix.bits
    )
    if matrix.bits == 8:
        codes = codes.reshape(blocks, cols // 2, BLOCK_ROWS, 2).transpose(0, 2, 1, 3)
    else:
        codes = codes.reshape(blocks, cols // 8, BLOCK_ROWS, 4).transpose(0, 2, 1, 3)
    words = codes.reshape(blocks * BLOCK_ROWS, -1).view(mx.uint32)
    return [words, scales.reshape(blocks, num_groups, BLOCK_ROWS).transpose(0, 2, 1).reshape(-1, num_groups)]


def _lines(block: mx.array, num_groups: int, group_bytes: int) -> tuple[mx.array, mx.array]:
    """Scales [blocks, groups * 16] and codes [blocks, groups * group_bytes] of blocks of lines, the last one of which may be shorter."""
    per_line = layout.LINE_BYTES // BLOCK_ROWS
    whole, rest = divmod(num_groups, per_line)
    line_bytes = layout.LINE_BYTES + per_line * group_bytes
    scales, codes = [], []
    if whole:
        lines = block[:, : whole * line_bytes].reshape(len(block), whole, -1)
        scales.append(lines[:, :, : layout.LINE_BYTES].reshape(len(block), -1))
        codes.append(lines[:, :, layout.LINE_BYTES :].reshape(len(block), -1))
    if rest:
        last = block[:, whole * line_bytes :]
        scales.append(last[:, : rest * BLOCK_ROWS])
        codes.append(last[:, layout.LINE_BYTES : layout.LINE_BYTES + rest * group_bytes])
    return mx.concatenate(scales, axis=1), mx.concatenate(codes, axis=1)


def _units(words: mx.array, bits: int) -> mx.array:
    """Words [..., n, 16] of a group as units: the codes of every second of 8 columns, a byte each (`layout`)."""
    units, first, low = mx.array(0, mx.uint32), 0, 0
    num_units = words.shape[-2] * 8 // bits
    for width in layout.code_parts(bits):
        part = words[..., first : first + num_units * width // 8, :]
        mask = (2**width - 1) * 0x01010101
        found = mx.stack([part >> width * j & mask for j in range(8 // width)], axis=-2)
        units = units | found.reshape(*words.shape[:-2], num_units, BLOCK_ROWS) << low
        first, low = first + num_units * width // 8, low + width
    return units


def _in_order(units: mx.array) -> mx.array:
    """Pairs of units [..., n, 16], the even and the odd ones of 8 columns, as two words of 4 columns each."""
    pairs = units.reshape(*units.shape[:-2], -1, 2, BLOCK_ROWS)
    even, odd = pairs[..., 0, :], pairs[..., 1, :]
    low = (even & 0xFF) | (odd & 0xFF) << 8 | (even & 0xFF00) << 8 | (odd & 0xFF00) << 16
    high = (even >> 16 & 0xFF) | (odd >> 16 & 0xFF) << 8 | (even >> 24) << 16 | (odd >> 24) << 24
    return mx.stack([low, high], axis=-2).reshape(units.shape)


def _narrow(words: mx.array, bits: int) -> mx.array:
    """Words [rows, cols / 4] of a byte a code as a stream of `bits` a code: 8 codes are `bits` bytes."""
    codes = words.view(mx.uint8).reshape(len(words), -1, 8).astype(mx.uint64)
    eight = (codes << mx.arange(8, dtype=mx.uint64) * bits).sum(axis=-1)
    kept = eight.view(mx.uint8).reshape(*eight.shape, 8)[..., :bits]
    return kept.reshape(len(words), -1).view(mx.uint32)
