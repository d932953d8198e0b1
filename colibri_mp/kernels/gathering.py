"""Rows of packed matrices as float32, compiled: the embedding lookup. Used through `layout.gather_rows`."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from colibri_mp.kernels import emit, layout, reference
from colibri_mp.kernels.emit import F32, I16, I32, constant, load
from colibri_mp.kernels.jit import compiled, operation
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.vectors import get_f32, get_u8

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
def _field(words: int, lane: int, unit: int, byte: int, width: int) -> int:
    """The bits of one code in the words of a part (`layout`)."""
    units_a_word = 8 // width
    stored = np.int64(get_u8(words + (unit // units_a_word * 16 + lane) * 4 + byte))
    return int(stored >> (width * (unit % units_a_word)) & ((1 << width) - 1))


@compiled
def _code(words: int, lane: int, column: int, group: int, widths: Any) -> int:
    """The code of a column of a group."""
    unit, byte = 2 * (column // 8) + column % 2, column % 8 // 2
    code = _field(words, lane, unit, byte, widths[0])
    if widths[1] > 0:
        code |= _field(words + 2 * group * widths[0], lane, unit, byte, widths[1]) << widths[0]
    return code


@compiled
def _gather_codes(block: int, lane: int, widths: Any, group: int, scale_kind: int, out: Any) -> None:
    size = 4 if scale_kind == 2 else 2
    codes_bytes = group * (widths[0] + widths[1]) * 2
    record_bytes = codes_bytes + 32 * size
    for g in range(out.size // group):
        record = block + g * record_bytes
        scale = _get(record + codes_bytes + lane * size, scale_kind)
        bias = _get(record + codes_bytes + (16 + lane) * size, scale_kind)
        for column in range(group):
            out[g * group + column] = np.float32(_code(record, lane, column, group, widths)) * scale + bias


@compiled
def _gather_symmetric(block: int, lane: int, width: int, group: int, scales: Any, out: Any) -> None:
    """scales: of the first group from its words' beginning, and bytes from one group's to the next; a step's words are those of `group`."""
    first_scale, scale_step, words_step = scales
    middle = np.float32(1 << (width - 1))
    for g in range(out.size // group):
        scale = get_f32(block + first_scale + g * scale_step + 4 * lane)
        for column in range(group):
            code = np.float32(
                _field(block + g * words_step, lane, 2 * (column // 8) + column % 2, column % 8 // 2, width)
            )
            out[g * group + column] = (code - middle) * scale


@compiled
def _gather_all_symmetric(
    data: int, block_bytes: int, width: int, group: int, scales: Any, row_ids: Any, out: Any
) -> None:
    for t in range(row_ids.size):
        block, lane = data + row_ids[t] // 16 * block_bytes, row_ids[t] % 16
        _gather_symmetric(block, lane, width, group, scales, out[t])


@compiled
def _gather_floats(block: int, lane: int, values: Any, group: int, scale_values: Any, out: Any) -> None:
    """FP4 (16 `values`) or FP8; without `scale_values` scales are float32, of whole blocks. Lines: `layout`."""
    is_fp4, per_line = values.size == 16, 4 if scale_values.size else 16
    group_bytes = group * (8 if is_fp4 else 16)
    for column in range(out.size):
        g, within = column // group, column % group
        line = block + g // per_line * (layout.LINE_BYTES + per_line * group_bytes)
        if scale_values.size:
            scale = scale_values[get_u8(line + 16 * (g % per_line) + lane)]
        else:
            scale = get_f32(line + 4 * (g % per_line))
        codes = line + layout.LINE_BYTES + g % per_line * group_bytes
        if is_fp4:
            code = get_u8(codes + (within // 8 * 16 + lane) * 4 + within % 8 // 2) >> (4 * (within % 2)) & 15
        else:
            code = np.int64(get_u8(codes + (within // 2 * 16 + lane) * 2 + within % 2))
        out[column] = values[code] * scale


@compiled
def _gather(data: int, block_bytes: int, widths: Any, group: int, kind: int, row_ids: Any, out: Any) -> None:
    for t in range(row_ids.size):
        block, lane = data + row_ids[t] // 16 * block_bytes, row_ids[t] % 16
        if group:
            _gather_codes(block, lane, widths, group, kind, out[t])
        else:
            _gather_dense(block, lane, kind, out[t])


@compiled
def _gather_all_floats(
    data: int, block_bytes: int, values: Any, group: int, scale_values: Any, row_ids: Any, out: Any
) -> None:
    for t in range(row_ids.size):
        block, lane = data + row_ids[t] // 16 * block_bytes, row_ids[t] % 16
        _gather_floats(block, lane, values, group, scale_values, out[t])


_SCALE_VALUES = {"e8m0": reference.E8M0, "e4m3": reference.E4M3, "tile": reference.E8M0[:0]}


def gather(matrix: PackedMatrix, row_ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """See `layout.gather_rows`."""
    kind, group, scale = matrix.format
    ids = np.array(row_ids, np.int32)  # a read-only array, as messages give, would be compiled for anew
    place = matrix.data.ctypes.data, layout.geometry(matrix.format, matrix.cols).block_bytes
    if kind in ("fp4", "fp8"):
        values = reference.FP4 if kind == "fp4" else reference.E4M3
        _gather_all_floats(*place, values, group, _SCALE_VALUES[scale], ids, out)
        return
    bits = layout.code_bits(matrix.format)
    if scale in ("symmetric", "row"):
        sizes = layout.geometry(matrix.format, matrix.cols)
        scales = 2 * group * bits, sizes.step_bytes, sizes.step_bytes
        if scale == "row":
            scales = sizes.num_steps * sizes.step_bytes, 0, sizes.step_bytes
        _gather_all_symmetric(*place, bits, group, scales, ids, out)
        return
    widths = (*layout.code_parts(bits), 0)[:2] if group else (0, 0)
    _gather(*place, widths, group, _ELEMENT_KINDS[scale or kind], ids, out)
