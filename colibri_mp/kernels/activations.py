"""Prepared rows: a token's activations in the form that tile kernels read.

    prepare(x, prepared, cols)          `Native`: addresses of float32 [cols] and of `prepared_bytes` bytes

    grouped formats    for each group: planes x group bytes, then float32 scale, float32 sum of x
                       unit u of 4 bytes of plane p at 4 * (u * P + p); unit 2i holds columns 8i+0,2,4,6, unit 2i+1 8i+1,3,5,7
    the same, generic  for each group: float32 x, an unused float32, float32 sum of x
    dense and fp8      float32 x, padded to a multiple of 8 with zeros

The form depends on the group size and the number of planes only: matrices of equal `form` share prepared rows (q4 and q8, any scale type).

Quantising: s = max|x| / Q, q = round(x / s) in [-Q, Q], Q = 127, 127 * 257 or 127 * 65793 for 1, 2, 3 planes, which are the base-256 digits
of q in [-128, 127]. A group whose largest |x| is below 1e-30 counts as zero.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from colibri_mp.formats import Format
from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I8, I32, I64, V16F, V16I, constant, load, offset, splat, vector
from colibri_mp.kernels.jit import Native, operation
from colibri_mp.kernels.layout import DENSE_STEP, uses_groups
from colibri_mp.kernels.tiles import USES_PLANES, group_record_bytes

LARGEST = {1: 127.0, 2: 127.0 * 257, 3: 127.0 * 65793}
"""Q of the module docstring for each number of planes."""
SMALLEST_SCALE = 1e-30


def form(matrix_format: Format) -> int:
    """Matrices of equal form (and equal number of planes and columns) share prepared rows: the group size, 0 for dense and fp8."""
    return matrix_format.group_size if uses_groups(matrix_format) else 0


def prepared_bytes(matrix_format: Format, cols: int, planes: int) -> int:
    """Bytes of one token's prepared row, a multiple of 64."""
    group = form(matrix_format)
    used = cols // group * group_record_bytes(group, planes) if group else -(-cols // DENSE_STEP) * DENSE_STEP * 4
    return -(-used // 64) * 64


def _digits(builder: Any, values: Sequence[Any], planes: int) -> list[list[Any]]:
    """[plane][vector] of int8 x 16: digits of base 256 in [-128, 127], most significant first."""
    digits: list[list[Any]] = []
    for plane in range(planes):
        lowest = [builder.trunc(value, vector(I8, 16)) for value in values]
        digits.insert(0, lowest)
        if plane < planes - 1:
            rest = [builder.sub(value, builder.sext(low, V16I)) for value, low in zip(values, lowest, strict=True)]
            values = [builder.ashr(value, constant(V16I, 8)) for value in rest]
    return digits


_EVEN_ODD = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def _interleave(builder: Any, planes: Sequence[Any]) -> Any:
    """int32 x 4 of each plane -> [4 units][planes]."""
    if len(planes) == 1:
        return planes[0]
    pair = emit.shuffle(builder, planes[0], planes[1], [0, 4, 1, 5, 2, 6, 3, 7])
    if len(planes) == 2:
        return pair
    third = emit.shuffle(builder, planes[2], planes[2], [0, 1, 2, 3, 0, 1, 2, 3])
    return emit.shuffle(builder, pair, third, [0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11])


def _quantise(builder: Any, values: Sequence[Any], planes: int) -> tuple[Any, list[Any]]:
    """(scale, int32 vectors) of one group."""
    largest = emit.absolute(builder, values[0])
    for value in values[1:]:
        largest = emit.maximum(builder, largest, emit.absolute(builder, value))
    top = emit.fold(builder, largest, lambda a, b: emit.maximum(builder, a, b))
    limit = LARGEST[planes]
    usable = builder.fcmp_unordered(">", top, constant(F32, float(np.float32(SMALLEST_SCALE))))
    scale = builder.select(usable, builder.fmul(top, constant(F32, float(np.float32(1.0 / limit)))), constant(F32, 0.0))
    inverse = splat(builder, builder.select(usable, builder.fdiv(constant(F32, limit), top), constant(F32, 0.0)))
    quantised = []
    for value in values:
        rounded = emit.call(builder, "llvm.rint.v16f32", V16F, [builder.fmul(value, inverse)])
        rounded = emit.maximum(builder, emit.minimum(builder, rounded, constant(V16F, limit)), constant(V16F, -limit))
        quantised.append(builder.fptosi(rounded, V16I))
    return scale, quantised


def _sum(builder: Any, values: Sequence[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = builder.fadd(total, value)
    return emit.fold(builder, total, builder.fadd)


def _emit_group(builder: Any, x: Any, record: Any, group: int, planes: int) -> None:
    values = [load(builder, offset(builder, x, 64 * i), V16F) for i in range(group // 16)]
    end = group_record_bytes(group, planes)
    emit.store(builder, _sum(builder, values), offset(builder, record, end - 4))
    if not USES_PLANES:
        for i, value in enumerate(values):
            emit.store(builder, value, offset(builder, record, 64 * i))
        return
    scale, quantised = _quantise(builder, values, planes)
    emit.store(builder, scale, offset(builder, record, end - 8))
    digits = _digits(builder, quantised, planes)
    for i in range(len(values)):
        ordered = [emit.shuffle(builder, plane[i], plane[i], _EVEN_ODD) for plane in digits]
        units = _interleave(builder, [builder.bitcast(plane, vector(I32, 4)) for plane in ordered])
        emit.store(builder, units, offset(builder, record, 16 * planes * i))


@operation(types.void, *[types.int64] * 3, num_literals=2)
def _prepare_groups(builder: Any, x: Any, prepared: Any, cols: Any, group_size: int, planes: int) -> None:
    record_bytes = group_record_bytes(group_size, planes)
    with cgutils.for_range(builder, builder.sdiv(cols, constant(I64, group_size)), intp=I64) as loop:
        source = builder.add(x, builder.mul(loop.index, constant(I64, 4 * group_size)))
        record = builder.add(prepared, builder.mul(loop.index, constant(I64, record_bytes)))
        _emit_group(builder, source, record, group_size, planes)


@operation(types.void, *[types.int64] * 3)
def _copy_padded(builder: Any, x: Any, prepared: Any, cols: Any) -> None:
    length = builder.mul(cols, constant(I64, 4))
    padded = builder.and_(builder.add(length, constant(I64, 4 * DENSE_STEP - 1)), constant(I64, -4 * DENSE_STEP))
    emit.copy(builder, x, prepared, length)
    rest = builder.inttoptr(builder.add(prepared, length), I8.as_pointer())
    arguments = [rest, constant(I8, 0), builder.sub(padded, length), constant(ir.IntType(1), 0)]
    emit.call(builder, "llvm.memset.p0.i64", ir.VoidType(), arguments)


def _prepare_dense(x: int, prepared: int, cols: int) -> None:
    _copy_padded(x, prepared, cols)


def _make(group_size: int, planes: int) -> Native:
    def prepare(x: int, prepared: int, cols: int) -> None:
        _prepare_groups(x, prepared, cols, group_size, planes)

    return Native(prepare)


@cache
def _prepare_kernel(group_size: int, planes: int) -> Native:
    return _make(group_size, planes) if group_size else Native(_prepare_dense)


def prepare_kernel(matrix_format: Format, planes: int) -> Native:
    """The function that prepares one row of activations for a format."""
    return _prepare_kernel(form(matrix_format), planes if uses_groups(matrix_format) and USES_PLANES else 0)
