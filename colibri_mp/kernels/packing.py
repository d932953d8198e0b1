"""Stored matrices -> packed matrices (`layout`), compiled, exact, without the GIL. Used through `layout.pack`.

Everything is a transposition of 16 rows: a tile of 16 rows x 16 words (64 bytes of each row) becomes 16 vectors, one word of every
row each, which are then dealt out to the records. What is not stored as the packed form wants it (codes of 2, 3, 5, 6 bits, FP4, FP8,
their scales) is first rewritten for 16 rows in a scratch buffer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.kernels import emit, layout, reference
from colibri_mp.kernels.emit import I16, V16I, constant, load, offset, vector
from colibri_mp.kernels.jit import compiled, intrinsic
from colibri_mp.kernels.vectors import get_u8, get_u64, set_f32, set_u64

WORDS, CODES, HALVES = 0, 1, 2
"""What a word holds: itself | four 8-bit codes, to be put in the order of `layout` | two 16-bit elements, to be separated."""
_TILE_BYTES = 2048
"""Scratch of `_transpose_block`: 16 vectors, then 16 padded rows of 64 bytes."""


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words, transposed by halves: four rounds of 16 shuffles."""
    for distance in (8, 4, 2, 1):
        low = [i if i & distance == 0 else i - distance + 16 for i in range(16)]
        high = [i + distance if i & distance == 0 else i + 16 for i in range(16)]
        swapped = list(rows)
        for i in range(16):
            if i & distance == 0:
                swapped[i] = emit.shuffle(builder, rows[i], rows[i + distance], low)
                swapped[i + distance] = emit.shuffle(builder, rows[i], rows[i + distance], high)
        rows = swapped
    return rows


def _even_bytes(builder: Any, first: Any, second: Any) -> Any:
    """Bytes 0 and 2 of each word of `first`, then of `second`."""
    mask = constant(V16I, 0x00FF00FF)

    def pair(word: Any) -> Any:
        masked = builder.and_(word, mask)
        return builder.and_(builder.or_(masked, builder.lshr(masked, constant(V16I, 8))), constant(V16I, 0xFFFF))

    return builder.or_(pair(first), builder.shl(pair(second), constant(V16I, 16)))


def _reorder_codes(builder: Any, words: list[Any]) -> list[Any]:
    reordered = []
    for first, second in zip(words[::2], words[1::2], strict=True):
        odd = [builder.lshr(word, constant(V16I, 8)) for word in (first, second)]
        reordered += [_even_bytes(builder, first, second), _even_bytes(builder, *odd)]
    return reordered


def _separate_halves(builder: Any, words: list[Any]) -> list[Any]:
    separated = []
    for word in words:
        halves = builder.bitcast(word, vector(I16, 32))
        separated.append(builder.bitcast(emit.shuffle(builder, halves, halves, [*range(0, 32, 2), *range(1, 32, 2)]), V16I))
    return separated


@intrinsic
def _transpose_tile(typing: Any, source: Any, row_stride: Any, target: Any, content: Any) -> Any:
    """64 bytes of each of 16 rows -> 16 vectors of 64 bytes at `target`, by `content`."""
    if not isinstance(content, types.IntegerLiteral):
        return None
    change = {WORDS: lambda builder, words: words, CODES: _reorder_codes, HALVES: _separate_halves}[content.literal_value]

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, at = [], args[0]
        for _ in range(16):
            rows.append(load(builder, at, V16I, align=1))
            at = builder.add(at, args[1])
        for i, word in enumerate(change(builder, _transpose(builder, rows))):
            emit.store(builder, word, offset(builder, args[2], 64 * i), align=16)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, content), generate


@intrinsic
def _copy(typing: Any, source: Any, target: Any, num_bytes: Any) -> Any:
    """memcpy between addresses."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit.copy(builder, args[0], args[1], args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@compiled
def _deal(tile: int, first: int, count: int, target: int, vector_bytes: int, per_record: int, record_bytes: int) -> None:
    """Vectors `first` .. of a part to their places: `per_record` of them in each record."""
    record, within = first // per_record, first % per_record
    for i in range(count):
        place = target + record * record_bytes + within * vector_bytes
        if vector_bytes == 64:
            _copy(tile + i * 64, place, 64)
        else:
            _copy(tile + i * 32, place, 32)
        within += 1
        if within == per_record:
            record, within = record + 1, 0


@compiled
def _transpose_block(
    source: int, row_stride: int, row_bytes: int, num_rows: int, target: int, content: int, per_record: int, record_bytes: int, tile: int
) -> None:
    """One part of up to 16 rows into the records at `target`; `tile` is 2048 bytes of scratch (16 vectors, then a padded source)."""
    vector_bytes = 32 if content == HALVES else 64
    padded = tile + 1024
    for start in range(0, row_bytes, 64):
        at, stride, used = source + start, row_stride, min(64, row_bytes - start)
        if num_rows < 16 or used < 64:
            for i in range(128):
                set_u64(padded + 8 * i, np.uint64(0))
            for row in range(num_rows):
                _copy(source + row * row_stride + start, padded + 64 * row, used)
            at, stride = padded, 64
        if content == WORDS:
            _transpose_tile(at, stride, tile, WORDS)
        elif content == CODES:
            _transpose_tile(at, stride, tile, CODES)
        else:
            _transpose_tile(at, stride, tile, HALVES)
        count = used * 16 // vector_bytes
        _deal(tile, start * 16 // vector_bytes, count, target, vector_bytes, per_record, record_bytes)


@compiled
def _pack_dense(source: int, rows: int, cols: int, element_bytes: int, target: int, block_bytes: int, tile: int) -> None:
    content = WORDS if element_bytes == 4 else HALVES
    row_bytes = cols * element_bytes
    padded_cols = block_bytes // (16 * element_bytes)
    for block in range((rows + 15) // 16):
        place = target + block * block_bytes
        for i in range((padded_cols - cols) * 16 * element_bytes // 8):
            set_u64(place + cols * 16 * element_bytes + 8 * i, np.uint64(0))
        num_rows = min(16, rows - 16 * block)
        _transpose_block(source + 16 * block * row_bytes, row_bytes, row_bytes, num_rows, place, content, 1 << 40, 0, tile)


@compiled
def _spread(fields: Any, bits: Any) -> Any:
    """8 fields of `bits` bits (uint64) -> 8 bytes: apart by halves, quarters, eighths."""
    one = np.uint64(1)
    for size, width in ((np.uint64(4), np.uint64(32)), (np.uint64(2), np.uint64(16)), (np.uint64(1), np.uint64(8))):
        field_bits = size * bits
        low = np.uint64(0)
        step = width + width
        mask = (one << field_bits) - one
        place = np.uint64(0)
        while place < np.uint64(64):
            low |= mask << place
            place += step
        fields = (fields & low) | ((fields & (low << field_bits)) << (width - field_bits))
    return fields


@compiled
def _widen_rows(source: int, end: int, row_bytes: int, num_rows: int, cols: int, bits: int, table: Any, target: int) -> None:
    """Codes of `bits` bits of some rows -> bytes, through `table` (uint8 [256]; empty: as they are). Reads nothing from `end` on."""
    wide = np.uint64(bits)
    keep = (np.uint64(1) << np.uint64(8 * bits)) - np.uint64(1)
    for row in range(num_rows):
        at, to = source + row * row_bytes, target + row * cols
        for _ in range(cols // 8):
            if at + 8 <= end:
                fields = get_u64(at) & keep
            else:
                fields = np.uint64(0)
                for i in range(bits):
                    fields |= np.uint64(get_u8(at + i)) << np.uint64(8 * i)
            codes = _spread(fields, wide)
            if table.size:
                looked_up = np.uint64(0)
                for i in range(8):
                    shift = np.uint64(8 * i)
                    looked_up |= np.uint64(table[(codes >> shift) & np.uint64(255)]) << shift
                codes = looked_up
            set_u64(to, codes)
            at += bits
            to += 8


@compiled
def _pack_affine(
    parts: Any, rows: int, cols: int, bits: int, group: int, scale_bytes: int, target: int, record_bytes: int, scratch: int
) -> None:
    """parts: addresses of weight, its end, scales, biases; scratch: _TILE_BYTES, then 16 * cols bytes for codes that are widened."""
    weight, end, scales, biases = parts
    code_bits = 4 if bits == 4 else 8
    widened = scratch + _TILE_BYTES
    table = np.empty(0, np.uint8)
    row_bytes, groups = cols * bits // 8, cols // group
    words, scale_content = group * code_bits // 32, WORDS if scale_bytes == 4 else HALVES
    scales_at = words * 64
    for block in range((rows + 15) // 16):
        place = target + block * groups * record_bytes
        num_rows = min(16, rows - 16 * block)
        first = weight + 16 * block * row_bytes
        if bits == 4:
            _transpose_block(first, row_bytes, row_bytes, num_rows, place, WORDS, words, record_bytes, scratch)
        elif bits == 8:
            _transpose_block(first, row_bytes, row_bytes, num_rows, place, CODES, words, record_bytes, scratch)
        else:
            _widen_rows(first, end, row_bytes, num_rows, cols, bits, table, widened)
            _transpose_block(widened, cols, cols, num_rows, place, CODES, words, record_bytes, scratch)
        scale_row = groups * scale_bytes
        skip = 16 * block * scale_row
        place += scales_at
        _transpose_block(scales + skip, scale_row, scale_row, num_rows, place, scale_content, 1, record_bytes, scratch)
        place += 16 * scale_bytes
        _transpose_block(biases + skip, scale_row, scale_row, num_rows, place, scale_content, 1, record_bytes, scratch)


@compiled
def _pack_fp4(
    parts: Any, rows: int, cols: int, group: int, codes: Any, scale_values: Any, target: int, record_bytes: int, scratch: int
) -> None:
    """FP4 codes -> bytes 2 * value + 12; scale = half of `scale_values[stored]`, bias = -12 scale."""
    weight, end, scales = parts
    row_bytes, groups = cols // 2, cols // group
    widened = scratch + _TILE_BYTES
    halves, offsets = widened + 16 * cols, widened + 16 * cols + 64 * groups  # float32 [16, groups] each
    words = group // 4
    for block in range((rows + 15) // 16):
        place = target + block * groups * record_bytes
        num_rows = min(16, rows - 16 * block)
        _widen_rows(weight + 16 * block * row_bytes, end, row_bytes, num_rows, cols, 4, codes, widened)
        _transpose_block(widened, cols, cols, num_rows, place, CODES, words, record_bytes, scratch)
        for row in range(num_rows):
            for g in range(groups):
                factor = scale_values[get_u8(scales + (16 * block + row) * groups + g)] * np.float32(0.5)
                set_f32(halves + 4 * (row * groups + g), factor)
                set_f32(offsets + 4 * (row * groups + g), np.float32(-12.0) * factor)
        place += words * 64
        _transpose_block(halves, 4 * groups, 4 * groups, num_rows, place, WORDS, 1, record_bytes, scratch)
        _transpose_block(offsets, 4 * groups, 4 * groups, num_rows, place + 64, WORDS, 1, record_bytes, scratch)


@compiled
def _decode_fp8(weight: int, scales: int, rows: int, cols: int, group: int, values: Any, scale_values: Any, out: int) -> None:
    groups = cols // group
    for row in range(rows):
        for g in range(groups):
            scale = scale_values[get_u8(scales + row * groups + g)]
            for column in range(g * group, g * group + group):
                set_f32(out + 4 * (row * cols + column), values[get_u8(weight + row * cols + column)] * scale)


@compiled
def _pack_fp8(
    parts: Any, rows: int, cols: int, group: int, values: Any, scale_values: Any, target: int, block_bytes: int, scratch: int
) -> None:
    weight, _, scales = parts
    decoded = scratch + _TILE_BYTES  # float32 [16, cols]
    for block in range((rows + 15) // 16):
        num_rows = min(16, rows - 16 * block)
        skip = 16 * block
        _decode_fp8(weight + skip * cols, scales + skip * (cols // group), num_rows, cols, group, values, scale_values, decoded)
        _pack_dense(decoded, num_rows, cols, 4, target + block * block_bytes, block_bytes, scratch)


def _addresses(parts: Sequence[npt.NDArray[np.uint8]]) -> tuple[int, ...]:
    weight = parts[0].ctypes.data
    return (weight, weight + parts[0].nbytes, *[part.ctypes.data for part in parts[1:]])


def pack_parts(
    encoding: Encoding, rows: int, cols: int, parts: Sequence[npt.NDArray[np.uint8]], out: npt.NDArray[np.uint8]
) -> None:
    """See `layout.pack`."""
    sizes = layout.geometry(encoding.format, cols)
    where, target = _addresses(parts), out.ctypes.data
    buffer = np.empty(_TILE_BYTES + 16 * cols * 4 + 64, np.uint8)  # widest: float32 rows of mxfp8; FP4: codes and factors of groups of 16
    scratch = buffer.ctypes.data + 63 & -64
    match encoding.kind:
        case "bf16" | "f16" | "f32":
            _pack_dense(where[0], rows, cols, ELEMENT_BYTES[encoding.kind], target, sizes.block_bytes, scratch)
        case "affine":
            element = ELEMENT_BYTES[encoding.scale]
            _pack_affine(where, rows, cols, encoding.bits, encoding.group_size, element, target, sizes.step_bytes, scratch)
        case "mxfp4" | "nvfp4":
            scale_values = reference.E8M0 if encoding.kind == "mxfp4" else reference.E4M3
            _pack_fp4(where, rows, cols, encoding.group_size, reference.FP4_CODES, scale_values, target, sizes.step_bytes, scratch)
        case "mxfp8":
            _pack_fp8(where, rows, cols, encoding.group_size, reference.E4M3, reference.E8M0, target, sizes.block_bytes, scratch)
