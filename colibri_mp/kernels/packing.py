"""Stored matrices -> packed matrices (`layout`), compiled, exact, without the GIL. Used through `layout.pack`.

Everything is a transposition of 16 rows: a tile of 16 rows x 16 words (64 bytes of each row) becomes 16 vectors, one word of every
row each, which are then dealt out to the records. Codes of 2, 3, 5 and 6 bits are first widened to bytes for 16 rows in a scratch buffer,
transposed there, and made narrow again. Scales of FP4 and FP8, few bytes, go one by one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.kernels import emit, layout
from colibri_mp.kernels.emit import I16, V16I, constant, load, offset, vector
from colibri_mp.kernels.jit import Native, compiled, fixed, operation
from colibri_mp.kernels.vectors import call_native3, copy_bytes, get_f32, get_u8, get_u64, set_f32, set_u8, set_u64

WORDS, CODES, HALVES = 0, 1, 2
"""What a word holds: itself | four 8-bit codes, to be put in the order of `layout` | two 16-bit elements, to be separated."""
_TILE_BYTES = 2048
"""Scratch of `_transpose_block`: 16 vectors, then 16 padded rows of 64 bytes."""
_ONE, _ANY = fixed(1), fixed(0)


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
def _widen_rows(source: int, end: int, row_bytes: int, num_rows: int, cols: int, bits: int, target: int) -> None:
    """Codes of `bits` bits of some rows -> bytes. Reads nothing from `end` on."""
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
            set_u64(to, _spread(fields, wide))
            at += bits
            to += 8


@compiled
def _part_words(units: int, num_units: int, width: int, low: int, target: int) -> None:
    """Bits [low, low + width) of the codes of some units -> their words (`layout`)."""
    mask = ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) * np.uint64(0x0101010101010101)
    down = np.uint64(low)
    for first in range(0, num_units, 8 // width):
        for i in range(0, 64, 8):
            word = np.uint64(0)
            for unit in range(8 // width):
                word |= ((get_u64(units + 64 * (first + unit) + i) >> down) & mask) << np.uint64(width * unit)
            set_u64(target + i, word)
        target += 64


@compiled
def _narrow(units: int, groups: int, group: int, parts: Any, target: int, record_bytes: int) -> None:
    """Units of bytes of a block of rows -> the words of its records; parts: widths of one or two parts, 0: there is none."""
    for g in range(groups):
        place, source = target + g * record_bytes, units + 16 * group * g
        _part_words(source, group // 4, parts[0], 0, place)
        if parts[1] > 0:
            _part_words(source, group // 4, parts[1], parts[0], place + 2 * group * parts[0])


@compiled
def _pack_affine(
    parts: Any,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    scale_bytes: int,
    contents: Any,
    widths: Any,
    target: int,
    record_bytes: int,
    scratch: int,
) -> None:
    """parts: addresses of weight, its end, scales, biases; contents: of words and scales; scratch: _TILE_BYTES, then 32 * cols bytes."""
    weight, end, scales, biases = parts
    words, factors = contents
    row_bytes, groups = cols * bits // 8, cols // group
    num_words = group * bits // 32
    scale_row = groups * scale_bytes
    wide = scratch + _TILE_BYTES
    units = wide + 16 * cols
    for block in range((rows + 15) // 16):
        place, num_rows = target + block * groups * record_bytes, min(16, rows - 16 * block)
        at = weight + 16 * block * row_bytes
        if bits == 4 or bits == 8:  # noqa: PLR1714  # compiled code has no sets
            _transpose_block(at, row_bytes, row_bytes, num_rows, place, words, num_words, record_bytes, scratch)
        else:
            _widen_rows(at, end, row_bytes, num_rows, cols, bits, wide)
            _transpose_block(wide, cols, cols, num_rows, units, words, cols // 4, _ANY, scratch)
            _narrow(units, groups, group, widths, place, record_bytes)
        place, skip = place + num_words * 64, 16 * block * scale_row
        _transpose_block(scales + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)
        place += 16 * scale_bytes
        _transpose_block(biases + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)


@compiled
def _pack_byte_scales(scales: int, groups: int, num_rows: int, target: int) -> None:
    """Scales u8 [num_rows, groups] -> [groups][16]."""
    for row in range(16):
        for g in range(groups):
            scale = get_u8(scales + row * groups + g) if row < num_rows else np.uint8(0)
            set_u8(target + 16 * g + row, scale)


@compiled
def _pack_tile_scales(scales: int, tiles: int, scale_bytes: int, target: int) -> None:
    """Scales of one row of tiles, bf16 or float32 -> float32."""
    for i in range(tiles):
        if scale_bytes == 4:
            set_f32(target + 4 * i, get_f32(scales + 4 * i))
        else:
            set_u8(target + 4 * i, np.uint8(0))
            set_u8(target + 4 * i + 1, np.uint8(0))
            set_u8(target + 4 * i + 2, get_u8(scales + 2 * i))
            set_u8(target + 4 * i + 3, get_u8(scales + 2 * i + 1))


@compiled
def _pack_floats(
    parts: Any, rows: int, cols: int, sizes: Any, content: Any, target: int, block_bytes: int, scratch: int
) -> None:
    """FP4 and FP8: the codes of a block, then its scales, then zeros.

    parts: addresses of weight, its end, scales; sizes: bits, groups of a row, bytes of a scale, rows that share it.
    """
    weight, _, scales = parts
    bits, groups, scale_bytes, row_tile = sizes
    row_bytes = cols * bits // 8
    vector_bytes = content[1]
    num_vectors = 16 * row_bytes // vector_bytes
    for block in range((rows + 15) // 16):
        place, num_rows, first = target + block * block_bytes, min(16, rows - 16 * block), 16 * block
        at = weight + first * row_bytes
        for i in range(0, block_bytes - 16 * row_bytes, 8):
            set_u64(place + 16 * row_bytes + i, np.uint64(0))
        _transpose_block(at, row_bytes, row_bytes, num_rows, place, content, num_vectors, _ANY, scratch)
        from_scales = scales + first // row_tile * groups * scale_bytes
        if row_tile == 1:
            _pack_byte_scales(from_scales, groups, num_rows, place + 16 * row_bytes)
        else:
            _pack_tile_scales(from_scales, groups, scale_bytes, place + 16 * row_bytes)


@compiled
def _pack_symmetric(
    parts: Any, rows: int, cols: int, numbers: Any, contents: Any, target: int, block_bytes: int, scratch: int
) -> None:
    """colibrì's. parts: addresses of weight, its end, scales; numbers: bits, columns that share a scale, bytes of a record."""
    weight, _, scales = parts
    words, factors = contents
    bits, group, record_bytes = numbers
    row_bytes, scale_row = cols * bits // 8, 4 * (cols // group)
    num_words = group * bits // 32
    for block in range((rows + 15) // 16):
        place, num_rows = target + block * block_bytes, min(16, rows - 16 * block)
        at = weight + 16 * block * row_bytes
        _transpose_block(at, row_bytes, row_bytes, num_rows, place, words, num_words, record_bytes, scratch)
        if bits == 8:
            for i in range(0, 16 * row_bytes, 8):  # only rows have 8 bits: there is nothing between the words
                set_u64(place + i, get_u64(place + i) ^ np.uint64(0x8080808080808080))
        at = scales + 16 * block * scale_row
        place += 64 * num_words
        _transpose_block(at, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)


def _addresses(parts: Sequence[npt.NDArray[np.uint8]]) -> tuple[int, ...]:
    weight = parts[0].ctypes.data
    return (weight, weight + parts[0].nbytes, *[part.ctypes.data for part in parts[1:]])


def pack_parts(
    encoding: Encoding, rows: int, cols: int, parts: Sequence[npt.NDArray[np.uint8]], out: npt.NDArray[np.uint8]
) -> None:
    """See `layout.pack`."""
    sizes, group, bits = layout.geometry(encoding.format, cols), encoding.group_size, encoding.bits
    where, target = _addresses(parts), out.ctypes.data
    buffer = np.empty(_TILE_BYTES + 32 * cols + 64, np.uint8)
    scratch = buffer.ctypes.data + 63 & -64
    match encoding.kind:
        case "bf16" | "f16" | "f32":
            element = ELEMENT_BYTES[encoding.kind]
            content = _ELEMENTS[element].arguments()
            _pack_dense(where[0], rows, cols, element, content, target, sizes.block_bytes, scratch)
        case "affine":
            element, widths = ELEMENT_BYTES[encoding.scale], (*layout.code_parts(bits), 0)[:2]
            contents = (_WORDS if bits == 4 else _CODES).arguments(), _ELEMENTS[element].arguments()
            _pack_affine(where, rows, cols, bits, group, element, contents, widths, target, sizes.step_bytes, scratch)
        case "mxfp4" | "nvfp4" | "mxfp8" | "fp8":
            content = (_WORDS if bits == 4 else _HALVES).arguments()
            numbers = bits, encoding.groups(rows, cols)[1], ELEMENT_BYTES[encoding.scale], encoding.row_tile
            _pack_floats(where, rows, cols, numbers, content, target, sizes.block_bytes, scratch)
        case "grouped" | "row":
            shared = cols if encoding.kind == "row" else group
            contents = (_WORDS if bits == 4 else _CODES).arguments(), _WORDS.arguments()
            places = bits, shared, sizes.step_bytes
            _pack_symmetric(where, rows, cols, places, contents, target, sizes.block_bytes, scratch)
