"""Resident matrices on the device, in the form that the checkpoint has where MLX computes with it.

    stored                                        held as
    affine 2, 3, 4, 5, 6, 8 bits                  the same codes; scales and biases as float32
    int4 in groups, int4 and int8 by row          the same codes; scales for each group, biases of -8 or -128 scales
    mxfp4, nvfp4, mxfp8                           as stored
    bf16, f16, f32                                as stored; widened to float32 for a product, some rows at a time
    anything else                                 its values as float32, once

Activations are float32, and so is every product and sum: MLX widens nothing by itself that would be rounded before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.formats import Encoding
from colibri_mp.mlx_backend.device import to_device
from colibri_mp.recoding import decode

Bytes = NDArray[np.uint8]

GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
"""Affine quantisation that MLX computes with."""
WIDENED_BYTES = 32 << 20
"""Float32 memory that a product with a 16-bit matrix takes beside it, at most."""
_ELEMENTS: dict[str, tuple[type[np.uint16 | np.uint32], mx.Dtype]] = {
    "bf16": (np.uint16, mx.bfloat16),
    "f16": (np.uint16, mx.float16),
    "f32": (np.uint32, mx.float32),
}


def is_native(encoding: Encoding) -> bool:
    """Whether MLX computes with the stored codes."""
    if encoding.kind in ("affine", "grouped", "row"):
        return encoding.bits in BITS and encoding.group_size in GROUP_SIZES
    return encoding.kind in ("mxfp4", "nvfp4", "mxfp8")


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix [rows, cols] on the device.

    `mode` "": `weight` is [rows, cols] elements; else words of codes, as `mx.quantize` makes them.
    """

    rows: int
    cols: int
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    mode: str = ""
    bits: int = 0
    group_size: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., cols] float32 -> x W^T [..., rows]."""
        if self.mode:
            assert self.scales is not None
            return mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True,
                group_size=self.group_size, bits=self.bits, mode=self.mode,
            )  # fmt: skip
        step = self.rows if self.weight.dtype == mx.float32 else max(1, WIDENED_BYTES // (4 * self.cols))
        if step >= self.rows:
            return x @ self.weight.astype(mx.float32).T
        products = []
        for start in range(0, self.rows, step):
            products.append(x @ self.weight[start : start + step].astype(mx.float32).T)
            mx.eval(products[-1])
        return mx.concatenate(products, axis=-1)

    def gather(self, row_ids: NDArray[np.int32]) -> mx.array:
        """Rows as float32 [T, cols]."""
        ids = to_device(row_ids)
        if not self.mode:
            return self.weight[ids].astype(mx.float32)
        assert self.scales is not None
        biases = None if self.biases is None else self.biases[ids]
        rows = mx.dequantize(
            self.weight[ids], self.scales[ids], biases,
            group_size=self.group_size, bits=self.bits, mode=self.mode, dtype=mx.float32,
        )  # fmt: skip
        return rows.astype(mx.float32)


@dataclass(frozen=True, eq=False)
class MatrixStack:
    """Matrices [S, rows, cols] of one `Matrix`, whose rows are theirs one after the other; a 16-bit one is widened whole for a product."""

    whole: Matrix
    num: int

    def rows(self, first: int, end: int) -> "MatrixStack":
        """Some rows of each: first ... end."""
        cut = [None if part is None else self._apart(part)[:, first:end] for part in _arrays(self.whole)]
        weight, scales, biases = (None if part is None else part.reshape(-1, part.shape[-1]) for part in cut)
        assert weight is not None
        mx.eval([part for part in (weight, scales, biases) if part is not None])
        return MatrixStack(replace(self.whole, rows=len(weight), weight=weight, scales=scales, biases=biases), self.num)

    def __call__(self, x: mx.array) -> mx.array:
        """x [S, n, cols] -> x W^T [S, n, rows]."""
        return self._product(x, transpose=True)

    def back(self, x: mx.array) -> mx.array:
        """x [S, n, rows] -> x W [S, n, cols]."""
        return self._product(x, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        whole = self.whole
        weight, scales, biases = (None if part is None else self._apart(part) for part in _arrays(whole))
        assert weight is not None
        if not whole.mode:
            wide = weight.astype(mx.float32)
            return x @ (wide.swapaxes(1, 2) if transpose else wide)
        assert scales is not None
        return mx.quantized_matmul(
            x, weight, scales, biases, transpose=transpose,
            group_size=whole.group_size, bits=whole.bits, mode=whole.mode,
        )  # fmt: skip

    def _apart(self, part: mx.array) -> mx.array:
        return part.reshape(self.num, -1, part.shape[-1])


def _arrays(matrix: Matrix) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
    return matrix.weight, matrix.scales, matrix.biases


def load(stored: StoredMatrix, parts: Sequence[Bytes]) -> Matrix:
    """A stored matrix, from its parts as read, on the device when this returns."""
    matrix = make(stored.encoding, stored.rows, stored.cols, parts)
    mx.eval([array for array in (matrix.weight, matrix.scales, matrix.biases) if array is not None])
    return matrix


def make(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes]) -> Matrix:
    """`parts` as in `kernels.layout.pack`."""
    if not encoding.group_size and encoding.kind in _ELEMENTS:
        return Matrix(rows, cols, _elements(parts[0], encoding.kind).reshape(rows, cols))
    if not is_native(encoding):
        return Matrix(rows, cols, to_device(decode(encoding, rows, cols, parts)))
    words = _typed(parts[0], np.uint32).reshape(rows, -1)
    if encoding.kind == "affine":
        scales, biases = (_elements(part, encoding.scale).reshape(rows, -1).astype(mx.float32) for part in parts[1:])
        return Matrix(rows, cols, to_device(words), scales, biases, "affine", encoding.bits, encoding.group_size)
    if encoding.kind in ("grouped", "row"):
        signed = encoding.bits == 8  # as stored; from 0 on here
        scales = _elements(parts[1], encoding.scale).reshape(rows, -1)
        scales = mx.contiguous(mx.broadcast_to(scales, (rows, cols // encoding.group_size)))
        biases = scales * -(2.0 ** (encoding.bits - 1))
        weight = to_device(words ^ 0x80808080 if signed else words)
        return Matrix(rows, cols, weight, scales, biases, "affine", encoding.bits, encoding.group_size)
    scales = to_device(parts[1].reshape(rows, -1))
    return Matrix(rows, cols, to_device(words), scales, None, encoding.kind, encoding.bits, encoding.group_size)


def device_bytes(encoding: Encoding, rows: int, cols: int) -> int:
    """Bytes that `make` takes on the device, for the memory plan."""
    if not encoding.group_size and encoding.kind in _ELEMENTS:
        return sum(encoding.part_bytes(rows, cols))
    if not is_native(encoding):
        return 4 * rows * cols
    if encoding.kind in ("affine", "grouped", "row"):
        return rows * cols * encoding.bits // 8 + 8 * rows * (cols // encoding.group_size)
    return sum(encoding.part_bytes(rows, cols))


def widened_bytes(encoding: Encoding, rows: int, cols: int) -> int:
    """Float32 memory that a product takes beside a matrix that is held so, for the memory plan."""
    return min(WIDENED_BYTES, 4 * rows * cols) if encoding.kind in ("bf16", "f16") else 0


def _elements(part: Bytes, kind: str) -> mx.array:
    host, device = _ELEMENTS[kind]
    return to_device(_typed(part, host)).view(device)


def _typed(part: Bytes, dtype: type[np.uint16 | np.uint32]) -> NDArray[Any]:
    """Stored bytes, which may begin anywhere, as numbers."""
    return np.ascontiguousarray(part).view(dtype)
