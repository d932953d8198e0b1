"""Stored matrices -> packed matrices (`layout`), compiled, exact, without the GIL. Used through `layout.pack`.

Everything is a transposition of 16 rows: a tile of 16 rows x 16 words (64 bytes of each row) becomes 16 vectors, one word of every
row each, which are then dealt out to the records. What is not stored as the packed form wants it (codes of 2, 3, 5, 6 bits, FP4, FP8,
their scales) is first rewritten for 16 rows in a scratch buffer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.kernels import emit, layout, reference
from colibri_mp.kernels.emit import I16, V16I, constant, load, offset, vector
from colibri_mp.kernels.jit import Native, compiled, fixed, operation
from colibri_mp.kernels.vectors import call_native3, copy_bytes, get_u8, get_u64, set_f32, set_u64

WORDS, CODES, HALVES = 0, 1, 2
"""What a word holds: itself | four 8-bit codes, to be put in the order of `layout` | two 16-bit elements, to be separated."""
_TILE_BYTES = 2048
"""Scratch of `_transpose_block`: 16 vectors, then 16 padded rows of 64 bytes."""
_NO_TABLE = np.zeros(0, np.uint8)
_ONE, _FOUR, _ANY = fixed(1), fixed(4), fixed(0)


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
        separated.append(
            builder.bitcast(emit.shuffle(builder, halves, halves, [*range(0, 32, 2), *range(1, 32, 2)]), V16I)
        )
    return separated


@operation(types.void, *[types.int64] * 3, num_literals=1)
def _transpose_tile(builder: Any, source: Any, row_stride: Any, target: Any, content: int) -> None:
    """64 bytes of each of 16 rows -> 16 vectors of 64 bytes at `target`, by `content`."""
    rows = []
    for _ in range(16):
        rows.append(load(builder, source, V16I, align=1))
        source = builder.add(source, row_stride)
    words = _transpose(builder, rows)
    if content != WORDS:
        words = (_reorder_codes if content == CODES else _separate_halves)(builder, words)
    for i, word in enumerate(words):
        emit.store(builder, word, offset(builder, target, 64 * i), align=16)


def _make_transpose(content: int) -> Native:
    def transpose(source: int, row_stride: int, target: int) -> None:
        _transpose_tile(source, row_stride, target, content)

    return Native(transpose)


class _Content(NamedTuple):
    """What the words of a part hold: how to transpose them, and bytes of a vector of 16 elements."""

    transpose: Native
    vector_bytes: int

    def arguments(self) -> tuple[int, int]:
        return self.transpose.address, self.vector_bytes


_WORDS, _CODES, _HALVES = (
    _Content(_make_transpose(content), size) for content, size in ((WORDS, 64), (CODES, 64), (HALVES, 32))
)
_ELEMENTS = {2: _HALVES, 4: _WORDS}


@compiled
def _deal(
    tile: int, first: int, count: int, target: int, vector_bytes: int, per_record: int, record_bytes: int
) -> None:
    """Vectors `first` .. of a part to their places: `per_record` of them in each record."""
    record, within = first // per_record, first % per_record
    for i in range(count):
        place = target + record * record_bytes + within * vector_bytes
        if vector_bytes == 64:
            copy_bytes(tile + i * 64, place, 64)
        else:
            copy_bytes(tile + i * 32, place, 32)
        within += 1
        if within == per_record:
            record, within = record + 1, 0


@compiled
def _transpose_block(
    source: int,
    row_stride: int,
    row_bytes: int,
    num_rows: int,
    target: int,
    content: Any,
    per_record: int,
    record_bytes: int,
    tile: int,
) -> None:
    """One part of up to 16 rows into the records at `target`. content: see `_Content.arguments`; tile: _TILE_BYTES of scratch."""
    transpose, vector_bytes = content
    padded = tile + 1024
    for start in range(0, row_bytes, 64):
        at, stride, used = source + start, row_stride, min(64, row_bytes - start)
        if num_rows < 16 or used < 64:
            for i in range(128):
                set_u64(padded + 8 * i, np.uint64(0))
            for row in range(num_rows):
                copy_bytes(source + row * row_stride + start, padded + 64 * row, used)
            at, stride = padded, 64
        call_native3(transpose, at, stride, tile)
        _deal(
            tile, start * 16 // vector_bytes, used * 16 // vector_bytes, target, vector_bytes, per_record, record_bytes
        )


@compiled
def _pack_dense(
    source: int, rows: int, cols: int, element_bytes: int, content: Any, target: int, block_bytes: int, tile: int
) -> None:
    row_bytes, column_bytes = cols * element_bytes, 16 * element_bytes
    for block in range((rows + 15) // 16):
        place = target + block * block_bytes
        for i in range(cols * column_bytes, block_bytes, 8):  # columns of padding
            set_u64(place + i, np.uint64(0))
        num_rows = min(16, rows - 16 * block)
        _transpose_block(
            source + 16 * block * row_bytes, row_bytes, row_bytes, num_rows, place, content, cols, _ANY, tile
        )


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
def _widen_rows(
    source: int, end: int, row_bytes: int, num_rows: int, cols: int, bits: int, table: Any, target: int
) -> None:
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
    parts: Any,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    scale_bytes: int,
    contents: Any,
    target: int,
    record_bytes: int,
    scratch: int,
) -> None:
    """parts: addresses of weight, its end, scales, biases; contents: of words and scales; scratch: _TILE_BYTES, then 16 * cols bytes."""
    weight, end, scales, biases = parts
    words, factors = contents
    row_bytes, groups = cols * bits // 8, cols // group
    num_words = group * (4 if bits == 4 else 8) // 32
    scale_row = groups * scale_bytes
    for block in range((rows + 15) // 16):
        place, num_rows = target + block * groups * record_bytes, min(16, rows - 16 * block)
        at, stride = weight + 16 * block * row_bytes, row_bytes
        if bits not in (4, 8):
            _widen_rows(at, end, row_bytes, num_rows, cols, bits, _NO_TABLE, scratch + _TILE_BYTES)
            at, stride = scratch + _TILE_BYTES, cols
        _transpose_block(at, stride, stride, num_rows, place, words, num_words, record_bytes, scratch)
        place, skip = place + num_words * 64, 16 * block * scale_row
        _transpose_block(scales + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)
        place += 16 * scale_bytes
        _transpose_block(biases + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)


@compiled
def _pack_fp4(
    parts: Any,
    rows: int,
    cols: int,
    group: int,
    values: Any,
    scale_values: Any,
    contents: Any,
    target: int,
    record_bytes: int,
    scratch: int,
) -> None:
    """FP4 codes -> bytes 2 * value + 12 (`values`); scale = half of `scale_values[stored]`, bias = -12 scale."""
    weight, end, scales = parts
    codes, factors = contents
    row_bytes, groups = cols // 2, cols // group
    widened = scratch + _TILE_BYTES
    halves, offsets = widened + 16 * cols, widened + 16 * cols + 64 * groups  # float32 [16, groups] each
    num_words, row_factors = group // 4, 4 * groups
    for block in range((rows + 15) // 16):
        place, num_rows = target + block * groups * record_bytes, min(16, rows - 16 * block)
        _widen_rows(weight + 16 * block * row_bytes, end, row_bytes, num_rows, cols, _FOUR, values, widened)
        _transpose_block(widened, cols, cols, num_rows, place, codes, num_words, record_bytes, scratch)
        for i in range(num_rows * groups):
            factor = scale_values[get_u8(scales + 16 * block * groups + i)] * np.float32(0.5)
            set_f32(halves + 4 * i, factor)
            set_f32(offsets + 4 * i, np.float32(-12.0) * factor)
        place += num_words * 64
        _transpose_block(halves, row_factors, row_factors, num_rows, place, factors, _ONE, record_bytes, scratch)
        _transpose_block(offsets, row_factors, row_factors, num_rows, place + 64, factors, _ONE, record_bytes, scratch)


@compiled
def _decode_fp8(
    weight: int, scales: int, rows: int, cols: int, group: int, values: Any, scale_values: Any, out: int
) -> None:
    groups = cols // group
    for row in range(rows):
        for g in range(groups):
            scale = scale_values[get_u8(scales + row * groups + g)]
            for column in range(g * group, g * group + group):
                set_f32(out + 4 * (row * cols + column), values[get_u8(weight + row * cols + column)] * scale)


@compiled
def _pack_fp8(
    parts: Any,
    rows: int,
    cols: int,
    group: int,
    values: Any,
    scale_values: Any,
    content: Any,
    target: int,
    block_bytes: int,
    scratch: int,
) -> None:
    weight, _, scales = parts
    decoded = scratch + _TILE_BYTES  # float32 [16, cols]
    for block in range((rows + 15) // 16):
        num_rows = min(16, rows - 16 * block)
        skip = 16 * block
        _decode_fp8(
            weight + skip * cols, scales + skip * (cols // group), num_rows, cols, group, values, scale_values, decoded
        )
        _pack_dense(decoded, num_rows, cols, _FOUR, content, target + block * block_bytes, block_bytes, scratch)


def _addresses(parts: Sequence[npt.NDArray[np.uint8]]) -> tuple[int, ...]:
    weight = parts[0].ctypes.data
    return (weight, weight + parts[0].nbytes, *[part.ctypes.data for part in parts[1:]])


def pack_parts(
    encoding: Encoding, rows: int, cols: int, parts: Sequence[npt.NDArray[np.uint8]], out: npt.NDArray[np.uint8]
) -> None:
    """See `layout.pack`."""
    sizes = layout.geometry(encoding.format, cols)
    where, target = _addresses(parts), out.ctypes.data
    buffer = np.empty(
        _TILE_BYTES + 16 * cols * 4 + 64, np.uint8
    )  # widest: float32 rows of mxfp8; FP4: codes and factors of groups of 16
    scratch = buffer.ctypes.data + 63 & -64
    match encoding.kind:
        case "bf16" | "f16" | "f32":
            element = ELEMENT_BYTES[encoding.kind]
            content = _ELEMENTS[element].arguments()
            _pack_dense(where[0], rows, cols, element, content, target, sizes.block_bytes, scratch)
        case "affine":
            element, group = ELEMENT_BYTES[encoding.scale], encoding.group_size
            contents = (_WORDS if encoding.bits == 4 else _CODES).arguments(), _ELEMENTS[element].arguments()
            _pack_affine(where, rows, cols, encoding.bits, group, element, contents, target, sizes.step_bytes, scratch)
        case "mxfp4" | "nvfp4":
            values, contents = reference.FP4_CODES, (_CODES.arguments(), _WORDS.arguments())
            factors = reference.E8M0 if encoding.kind == "mxfp4" else reference.E4M3
            _pack_fp4(
                where, rows, cols, encoding.group_size, values, factors, contents, target, sizes.step_bytes, scratch
            )
        case "mxfp8":
            tables, content = (reference.E4M3, reference.E8M0), _WORDS.arguments()
            _pack_fp8(where, rows, cols, encoding.group_size, *tables, content, target, sizes.block_bytes, scratch)
