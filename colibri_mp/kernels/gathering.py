"""Rows of packed matrices as float32, compiled: the embedding lookup. Used through `layout.gather_rows`."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from colibri_mp.kernels import emit, layout
from colibri_mp.kernels.emit import F32, I16, I32, constant, load
from colibri_mp.kernels.jit import compiled, operation
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.vectors import get_u8

_BF16, _F16, _F32 = 0, 1, 2
_ELEMENT_KINDS = {"bf16": _BF16, "f16": _F16, "f32": _F32}


@operation(types.float32, types.int64, num_literals=1)
def _element(builder: Any, address: Any, kind: int) -> Any:
    """The bf16, f16 or f32 at an address, as float32."""
    if kind == _F32:
        return load(builder, address, F32)
    bits = emit.splat(builder, load(builder, address, I16, align=2))
    convert = emit.bf16_to_f32 if kind == _BF16 else emit.f16_to_f32
    return builder.extract_element(convert(builder, bits), constant(I32, 0))


@compiled
def _get(address: int, kind: int) -> Any:
    if kind == 0:
        return _element(address, 0)
    if kind == 1:
        return _element(address, 1)
    return _element(address, 2)


@compiled
def _gather_dense(block: int, lane: int, kind: int, out: Any) -> None:
    size = 4 if kind == 2 else 2
    for column in range(out.size):
        out[column] = _get(block + (column * 16 + lane) * size, kind)


@compiled
def _gather_codes(block: int, lane: int, bits: int, group: int, scale_kind: int, out: Any) -> None:
    size = 4 if scale_kind == 2 else 2
    codes_bytes = group * bits * 2
    record_bytes = codes_bytes + 32 * size
    for g in range(out.size // group):
        record = block + g * record_bytes
        scale = _get(record + codes_bytes + lane * size, scale_kind)
        bias = _get(record + codes_bytes + (16 + lane) * size, scale_kind)
        for column in range(group):
            eighth, place = column // 8, column % 8
            if bits == 4:
                code = get_u8(record + (eighth * 16 + lane) * 4 + place // 2) >> (4 * (place % 2)) & 15
            else:
                code = np.int64(get_u8(record + ((2 * eighth + place % 2) * 16 + lane) * 4 + place // 2))
            out[g * group + column] = np.float32(code) * scale + bias


@compiled
def _gather(data: int, block_bytes: int, bits: int, group: int, kind: int, row_ids: Any, out: Any) -> None:
    for t in range(row_ids.size):
        block, lane = data + row_ids[t] // 16 * block_bytes, row_ids[t] % 16
        if bits:
            _gather_codes(block, lane, bits, group, kind, out[t])
        else:
            _gather_dense(block, lane, kind, out[t])


def gather(matrix: PackedMatrix, row_ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """See `layout.gather_rows`."""
    element = matrix.format.scale or matrix.format.kind
    ids = np.array(row_ids, np.int32)  # a read-only array, as messages give, would be compiled for anew
    block_bytes = layout.geometry(matrix.format, matrix.cols).block_bytes
    bits, group = layout.code_bits(matrix.format), matrix.format.group_size
    _gather(matrix.data.ctypes.data, block_bytes, bits, group, _ELEMENT_KINDS[element], ids, out)
