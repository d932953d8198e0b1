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
from numba.core import cgutils

from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.kernels import emit, layout
from colibri_mp.kernels.emit import I16, I64, V16I, constant, load, offset, vector
from colibri_mp.kernels.jit import Native, compiled, fixed, operation
from colibri_mp.kernels.vectors import (
    call_native3,
    call_native5,
    copy_bytes,
    get_f32,
    get_u8,
    get_u64,
    set_f32,
    set_u8,
    set_u64,
)

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


@operation(types.uint64, types.uint64, num_literals=1)
def _spread(builder: Any, fields: Any, bits: int) -> Any:
    """8 fields of `bits` bits -> 8 bytes: apart by halves, quarters, eighths."""
    for size, width in ((4, 32), (2, 16), (1, 8)):
        low = sum((1 << size * bits) - 1 << place for place in range(0, 64, 2 * width))
        high = builder.and_(fields, constant(I64, low << size * bits))
        moved = builder.shl(high, constant(I64, width - size * bits))
        fields = builder.or_(builder.and_(fields, constant(I64, low)), moved)
    return fields


def _make_widen(bits: int) -> Native:
    def widen(source: int, end: int, num_rows: int, cols: int, target: int) -> None:
        """Codes of some rows -> bytes. Reads nothing from `end` on."""
        for row in range(num_rows):
            at, to = source + row * (cols * bits // 8), target + row * cols
            for _ in range(cols // 8):
                if at + 8 <= end:
                    fields = get_u64(at) & np.uint64((1 << 8 * bits) - 1)
                else:
                    fields = np.uint64(0)
                    for i in range(bits):
                        fields |= np.uint64(get_u8(at + i)) << np.uint64(8 * i)
                set_u64(to, _spread(fields, bits))
                at += bits
                to += 8

    return Native(widen)


@operation(types.void, *[types.int64] * 3, num_literals=1)
def _narrow_group(builder: Any, units: Any, target: Any, group: Any, bits: int) -> None:
    """Units of a group, a byte a code -> its words (`layout`)."""
    low = 0
    for width in layout.code_parts(bits):
        units_a_word = 8 // width
        num_words = builder.sdiv(builder.mul(group, constant(I64, width)), constant(I64, 32))
        with cgutils.for_range(builder, num_words, intp=I64) as loop:
            first = builder.add(units, builder.mul(loop.index, constant(I64, 64 * units_a_word)))
            word = constant(V16I, 0)
            for unit in range(units_a_word):
                codes = builder.lshr(load(builder, offset(builder, first, 64 * unit), V16I), constant(V16I, low))
                part = builder.and_(codes, constant(V16I, (2**width - 1) * 0x01010101))
                word = builder.or_(word, builder.shl(part, constant(V16I, width * unit)))
            emit.store(builder, word, builder.add(target, builder.mul(loop.index, constant(I64, 64))))
        target, low = builder.add(target, builder.mul(num_words, constant(I64, 64))), low + width


def _make_narrow(bits: int) -> Native:
    def narrow(units: int, target: int, group: int) -> None:
        _narrow_group(units, target, group, bits)

    return Native(narrow)


_WIDEN, _NARROW = ({bits: make(bits) for bits in (2, 3, 5, 6)} for make in (_make_widen, _make_narrow))


@compiled
def _pack_affine(
    parts: Any,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    scale_bytes: int,
    contents: Any,
    natives: Any,
    target: int,
    record_bytes: int,
    scratch: int,
) -> None:
    """parts: addresses of weight, its end, scales, biases; contents: of words and scales; natives: addresses of what widens codes and makes
    them narrow again, or 0; scratch: _TILE_BYTES, then 32 * cols bytes.
    """
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
        if natives[0] == 0:
            _transpose_block(at, row_bytes, row_bytes, num_rows, place, words, num_words, record_bytes, scratch)
        else:
            call_native5(natives[0], at, end, num_rows, cols, wide)
            _transpose_block(wide, cols, cols, num_rows, units, words, cols // 4, _ANY, scratch)
            for g in range(groups):
                call_native3(natives[1], units + 16 * group * g, place + g * record_bytes, group)
        place, skip = place + num_words * 64, 16 * block * scale_row
        _transpose_block(scales + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)
        place += 16 * scale_bytes
        _transpose_block(biases + skip, scale_row, scale_row, num_rows, place, factors, _ONE, record_bytes, scratch)


@compiled
def _pack_byte_scales(scales: int, groups: int, num_rows: int, target: int, line_bytes: int) -> None:
    """Scales u8 [num_rows, groups] -> [groups][16], four of them in a line."""
    for row in range(num_rows):
        for g in range(groups):
            set_u8(target + g // 4 * line_bytes + g % 4 * 16 + row, get_u8(scales + row * groups + g))


@compiled
def _pack_tile_scales(scales: int, tiles: int, scale_bytes: int, target: int, line_bytes: int) -> None:
    """Scales of one row of tiles, bf16 or float32 -> float32, 16 of them in a line."""
    for i in range(tiles):
        place = target + i // 16 * line_bytes + i % 16 * 4
        if scale_bytes == 4:
            set_f32(place, get_f32(scales + 4 * i))
        else:
            set_u8(place + 2, get_u8(scales + 2 * i))
            set_u8(place + 3, get_u8(scales + 2 * i + 1))


@compiled
def _pack_floats(
    parts: Any, rows: int, cols: int, sizes: Any, content: Any, target: int, block_bytes: int, scratch: int
) -> None:
    """FP4 and FP8. parts: addresses of weight, its end, scales; sizes: bits, groups of a row, bytes of a scale, rows that share it, bytes
    of the codes of a line.
    """
    weight, _, scales = parts
    bits, groups, scale_bytes, row_tile, code_bytes = sizes
    row_bytes, line_bytes = cols * bits // 8, layout.LINE_BYTES + code_bytes
    per_line = code_bytes // content[1]
    for block in range((rows + 15) // 16):
        place, num_rows, first = target + block * block_bytes, min(16, rows - 16 * block), 16 * block
        at = weight + first * row_bytes
        for line in range(place, place + block_bytes, line_bytes):
            for i in range(0, layout.LINE_BYTES, 8):
                set_u64(line + i, np.uint64(0))
        codes = place + layout.LINE_BYTES
        _transpose_block(at, row_bytes, row_bytes, num_rows, codes, content, per_line, line_bytes, scratch)
        from_scales = scales + first // row_tile * groups * scale_bytes
        if row_tile == 1:
            _pack_byte_scales(from_scales, groups, num_rows, place, line_bytes)
        else:
            _pack_tile_scales(from_scales, groups, scale_bytes, place, line_bytes)


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
            element = ELEMENT_BYTES[encoding.scale]
            natives = (_WIDEN[bits].address, _NARROW[bits].address) if bits in _WIDEN else (0, 0)
            contents = (_WORDS if bits == 4 else _CODES).arguments(), _ELEMENTS[element].arguments()
            _pack_affine(where, rows, cols, bits, group, element, contents, natives, target, sizes.step_bytes, scratch)
        case "mxfp4" | "nvfp4" | "mxfp8" | "fp8":
            content = (_WORDS if bits == 4 else _HALVES).arguments()
            line = 2 * layout.groups_a_line(encoding.format) * group * bits
            numbers = bits, encoding.groups(rows, cols)[1], ELEMENT_BYTES[encoding.scale], encoding.row_tile, line
            _pack_floats(where, rows, cols, numbers, content, target, sizes.block_bytes, scratch)
        case "grouped" | "row":
            shared = cols if encoding.kind == "row" else group
            contents = (_WORDS if bits == 4 else _CODES).arguments(), _WORDS.arguments()
            places = bits, shared, sizes.step_bytes
            _pack_symmetric(where, rows, cols, places, contents, target, sizes.block_bytes, scratch)
