"""Codes and scales in registers: what the words of packed matrices (`layout`) become before they meet activations. All emit LLVM code."""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from colibri_mp.formats import Format
from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import I8, I16, ISA, V16F, V16I, constant, load, offset, vector
from colibri_mp.kernels.layout import code_bits, code_parts


class Codes(NamedTuple):
    """How the words of a group hold its codes."""

    bits: int
    group: int
    is_fp4: bool

    @property
    def largest(self) -> int:
        """The largest code that meets activations."""
        return 24 if self.is_fp4 else 2**self.bits - 1


def codes_of(matrix_format: Format) -> Codes:
    """Of a format whose products are made group by group."""
    return Codes(code_bits(matrix_format), matrix_format.group_size, matrix_format.kind == "fp4")


def unit_codes(builder: Any, word_at: Callable[[int], Any], codes: Codes, unit: int) -> Any:
    """The four bytes of a unit (`layout`) in each lane, as int32. word_at: a word of the group by number."""
    first = low = 0
    found = None
    for width in code_parts(codes.bits):
        units_a_word = 8 // width
        word = word_at(first + unit // units_a_word)
        if width == 8:
            return word
        shift = width * (unit % units_a_word) - low
        if shift:
            move = builder.lshr if shift > 0 else builder.shl
            word = move(word, constant(word.type, abs(shift)))
        part = builder.and_(word, constant(word.type, (2**width - 1 << low) * 0x01010101))
        found = part if found is None else builder.or_(found, part)
        first, low = first + codes.group * width // 32, low + width
    return found


_LOOKUPS = {
    "avx512_vnni": "llvm.x86.avx512.pshuf.b.512",
    "avx2": "llvm.x86.avx2.pshuf.b",
    "neon_dot": "llvm.aarch64.neon.tbl1.v16i8",
}
_FP4_CODES = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]
"""2 * value + 12 of each code of E2M1."""


def _fp4_bytes(builder: Any, codes: Any) -> Any:
    """E2M1 codes in the bytes of int32 lanes -> 2 * value + 12."""
    v8 = vector(I8, 4 * codes.type.count)
    table = ir.Constant(v8, _FP4_CODES * (v8.count // 16))
    found = emit.call(builder, _LOOKUPS[ISA], v8, [table, builder.bitcast(codes, v8)])
    return builder.bitcast(found, codes.type)


def dot_codes(builder: Any, word_at: Callable[[int], Any], codes: Codes, unit: int) -> Any:
    """What a dot product takes of a unit."""
    found = unit_codes(builder, word_at, codes, unit)
    return _fp4_bytes(builder, found) if codes.is_fp4 else found


def fp4_floats(builder: Any, codes: Any) -> Any:
    """E2M1 codes in int32 lanes -> 2 * value + 12 as float32: below 1 the exponent is that of 1, without the hidden bit."""
    one = constant(V16I, 1)
    exponent, mantissa = builder.and_(builder.lshr(codes, one), constant(V16I, 3)), builder.and_(codes, one)
    shift = builder.sub(exponent, builder.select(builder.icmp_signed(">", exponent, constant(V16I, 0)), one, exponent))
    hidden = builder.select(builder.icmp_signed(">", exponent, constant(V16I, 0)), constant(V16I, 2), constant(V16I, 0))
    magnitude = builder.shl(builder.or_(mantissa, hidden), shift)
    negative = builder.icmp_signed(">", codes, constant(V16I, 7))
    signed = builder.select(negative, builder.sub(constant(V16I, 0), magnitude), magnitude)
    return builder.sitofp(builder.add(signed, constant(V16I, 12)), V16F)


def _e4m3_to_half(builder: Any, high: Any) -> Any:
    """int16 lanes with E4M3 codes in their high bytes (anything in the low ones) -> IEEE halves of value / 256."""
    return builder.and_(builder.ashr(high, constant(high.type, 1)), constant(high.type, 0xBF80 - 0x10000))


def byte_scales(builder: Any, address: Any, kind: str) -> Any:
    """16 scales of a byte each, as float32. E8M0: 2^(code - 127), 255 is NaN; E4M3: as the codes of fp8."""
    stored = load(builder, address, vector(I8), align=1)
    if kind == "e4m3":
        high = builder.shl(builder.zext(stored, vector(I16)), constant(vector(I16), 8))
        return builder.fmul(emit.f16_to_f32(builder, _e4m3_to_half(builder, high)), constant(V16F, 256.0))
    code = builder.zext(stored, V16I)
    bits = builder.shl(code, constant(V16I, 23))
    bits = builder.select(builder.icmp_signed("==", code, constant(V16I, 0)), constant(V16I, 1 << 22), bits)
    bits = builder.select(builder.icmp_signed("==", code, constant(V16I, 255)), constant(V16I, 0x7FC00000), bits)
    return builder.bitcast(bits, V16F)


def fp8_columns(builder: Any, weights: Any) -> list[Any]:
    """Value / 256 of the 8 columns of a step, float32: pairs of columns share an int16, the first in its low byte."""
    columns = []
    for half in range(2):
        pairs = load(builder, offset(builder, weights, 64 * half), vector(I16, 32))
        first = _e4m3_to_half(builder, builder.shl(pairs, constant(pairs.type, 8)))
        parts = zip(emit.split(builder, first, 2), emit.split(builder, _e4m3_to_half(builder, pairs), 2), strict=True)
        columns += [emit.f16_to_f32(builder, part) for pair in parts for part in pair]
    return columns
