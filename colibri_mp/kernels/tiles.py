"""Tile kernels: 16 output rows (one block of a packed matrix) x a few tokens.

    kernel(weights, xs, ys, y_offset, num_steps)        all int64, see `Native`
        weights    address of the block's first record
        xs         address of int64 [tokens]: addresses of the tokens' prepared rows (`activations`)
        ys         address of int64 [tokens]: where each token's output row starts; the block's 16 results go to ys[t] + y_offset
        num_steps  `Geometry.num_steps`

Quantised weights, instruction sets with integer dot products. With P planes an activation is x = s * (c[0] * 256^(P-1) + ... + c[P-1]),
bytes c in [-128, 127]; for each group, in this order of float operations whatever the tile:

    dot[p] = sum over the group of code * c[p]                                      (int32, exact)
    v      = float(dot[0]) * 65536 + float(dot[1] * 256 + dot[2])                   (P = 3; fused)
    acc    = v * (scale * s) + acc;   acc = bias * (sum of x) + acc                 (fused)

FP4 is the same with code = 2 * value + 12, looked up in a register, scale / 2 and bias -6 * scale.

No overflow: |dot| <= 128 columns * 255 * 128 = 4,177,920 = A, and |dot[1] * 256 + dot[2]| <= 257 A = 1,073,725,440 < 2^31.
The hardware: `vpdpbusd` (u8 x s8, four products into int32, no saturation). `vpmaddubsw` adds pairs of products in int16 *with*
saturation: a 4-bit code gives at most 2 * 15 * 128 = 3840, and 8 such are summed in int16, 30,720 <= 32,767, before they are
widened, fewer of wider codes; 8-bit codes are taken as two nibbles, high ones first, shifted by 4. `sdot` is s8 x s8: nibbles again.

On the generic set, and for dense formats, everything is float32: products with the activations themselves, columns in ascending order.
FP8 is float32 everywhere: E4M3 shifted by 7 bits is an IEEE half of the value / 256. In each group, column c goes to sum c % 4, and
    acc = ((s0 + s1) + (s2 + s3)) * (256 * scale) + acc                             (fused)
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from colibri_mp.formats import ELEMENT_BYTES, Format
from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I8, I16, I32, I64, ISA, V16F, V16I, constant, load, offset, splat, vector
from colibri_mp.kernels.jit import Native, operation
from colibri_mp.kernels.layout import DENSE_STEP, code_bits, code_parts, geometry, uses_groups

USES_PLANES = ISA != "generic"
TILE_TOKENS = 4
"""Tokens of a wide tile (8 gained nothing on Zen 4, 2 lost 10 % with AVX2). Other counts are made of these and single tokens."""


def group_record_bytes(group_size: int, planes: int) -> int:
    """Bytes that one group takes in a prepared row: the columns, then float32 scale and sum."""
    return (planes if USES_PLANES else 4) * group_size + 8


# ---- integer dot products of one group


class _Codes(NamedTuple):
    """How the words of a group hold its codes."""

    bits: int
    group: int
    is_fp4: bool

    @property
    def largest(self) -> int:
        """The largest code that a dot product meets; 8-bit codes come in nibbles where the hardware would saturate."""
        return 24 if self.is_fp4 else 2 ** min(self.bits, 8) - 1


def _codes_of(matrix_format: Format) -> _Codes:
    return _Codes(code_bits(matrix_format), matrix_format.group_size, matrix_format.kind == "fp4")


def _unit_codes(builder: Any, word_at: Callable[[int], Any], codes: _Codes, unit: int) -> Any:
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
"""2 * value + 12 of each code of E2M1, as `reference.FP4_CODES`."""


def _fp4_bytes(builder: Any, codes: Any) -> Any:
    """E2M1 codes in the bytes of int32 lanes -> 2 * value + 12."""
    v8 = vector(I8, 4 * codes.type.count)
    table = ir.Constant(v8, _FP4_CODES * (v8.count // 16))
    found = emit.call(builder, _LOOKUPS[ISA], v8, [table, builder.bitcast(codes, v8)])
    return builder.bitcast(found, codes.type)


def _dot_codes(builder: Any, word_at: Callable[[int], Any], codes: _Codes, unit: int) -> Any:
    """What a dot product takes of a unit."""
    found = _unit_codes(builder, word_at, codes, unit)
    return _fp4_bytes(builder, found) if codes.is_fp4 else found


def _group_dots_vnni(builder: Any, words: Any, xs: Sequence[Any], codes: _Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane] of one group. Few accumulators would wait for each other: integers may be summed in any order."""
    chains = 2 if len(xs) * planes < 8 else 1
    accs = [[[constant(V16I, 0)] * chains for _ in range(planes)] for _ in xs]

    def word_at(index: int) -> Any:
        return load(builder, offset(builder, words, 64 * index), V16I)

    for unit in range(codes.group // 4):
        taken = _dot_codes(builder, word_at, codes, unit)
        for plane in range(planes):
            for t, x in enumerate(xs):
                value = splat(builder, load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32))
                acc = accs[t][plane]
                arguments = [acc[unit % chains], taken, value]
                acc[unit % chains] = emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", V16I, arguments)
    return [[acc[0] if chains == 1 else builder.add(acc[0], acc[1]) for acc in token] for token in accs]


_Unit = tuple[int, Callable[[Any, Callable[[int], Any]], Any]]
"""Number of a unit of activations, and what makes its codes out of words."""


def _nibble_passes(codes: _Codes) -> list[list[_Unit]]:
    """One pass over all units, of 8-bit codes two (high, low nibbles)."""

    def whole(unit: int) -> _Unit:
        return unit, lambda builder, word_at: _dot_codes(builder, word_at, codes, unit)

    def nibble(unit: int, shift: int) -> _Unit:
        def take(builder: Any, word_at: Callable[[int], Any]) -> Any:
            word = word_at(unit)
            shifted = builder.lshr(word, constant(word.type, shift)) if shift else word
            return builder.and_(shifted, constant(word.type, 0x0F0F0F0F))

        return unit, take

    units = range(codes.group // 4)
    if codes.bits < 8:
        return [[whole(unit) for unit in units]]
    return [[nibble(unit, shift) for unit in units] for shift in (4, 0)]


def _part_dots(builder: Any, passes: Any, new_sums: Callable[[], Any], add: Callable[..., None]) -> list[list[Any]]:
    """Run the passes over one part of the lanes; between them the sums are shifted by a nibble."""
    sums = new_sums()
    for index, units in enumerate(passes):
        if index:
            sums = [[builder.shl(s, constant(s.type, 4)) for s in token] for token in sums]
        add(sums, units)
    return sums  # type: ignore[no-any-return]  # LLVM values are untyped


def _group_dots_avx2(builder: Any, words: Any, xs: Sequence[Any], codes: _Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane], 8 rows at a time: twice as many tokens fit into the 16 registers."""
    v8i, v16s, v32b = vector(I32, 8), vector(I16, 16), vector(I8, 32)
    run = 32767 // (2 * 128 * (codes.largest if codes.bits < 8 else 15))  # so many sums of two products fit into int16
    halves = []
    for half in range(2):

        def word_at(index: int, half: int = half) -> Any:
            return load(builder, offset(builder, words, 64 * index + 32 * half), v8i)

        def add(sums: Any, units: list[_Unit], word_at: Callable[[int], Any] = word_at) -> None:
            for start in range(0, len(units), run):
                partial: dict[tuple[int, int], Any] = {}
                for unit, take in units[start : start + run]:
                    taken = builder.bitcast(take(builder, word_at), v32b)
                    for plane in range(planes):
                        for t, x in enumerate(xs):
                            value = load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32)
                            value = builder.bitcast(splat(builder, value, 8), v32b)
                            product = emit.call(builder, "llvm.x86.avx2.pmadd.ub.sw", v16s, [taken, value])
                            before = partial.get((t, plane))
                            partial[t, plane] = product if before is None else builder.add(before, product)
                for (t, plane), value in partial.items():
                    wide = emit.call(builder, "llvm.x86.avx2.pmadd.wd", v8i, [value, constant(v16s, 1)])
                    sums[t][plane] = builder.add(sums[t][plane], wide)

        halves.append(
            _part_dots(builder, _nibble_passes(codes), lambda: [[constant(v8i, 0)] * planes for _ in xs], add)
        )
    return [[emit.join(builder, [half[t][p] for half in halves]) for p in range(planes)] for t in range(len(xs))]


def _group_dots_neon(builder: Any, words: Any, xs: Sequence[Any], codes: _Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane], 4 rows at a time; four activations a load, `sdot` picks one of them."""
    v4i, v16b = vector(I32, 4), vector(I8, 16)
    quarters = []
    for quarter in range(4):

        def word_at(index: int, quarter: int = quarter) -> Any:
            return load(builder, offset(builder, words, 64 * index + 16 * quarter), v4i)

        def add(sums: Any, units: list[_Unit], word_at: Callable[[int], Any] = word_at) -> None:
            loaded: dict[tuple[int, int], Any] = {}
            for unit, take in units:
                taken = builder.bitcast(take(builder, word_at), v16b)
                for plane in range(planes):
                    vector_idx, lane = divmod(unit * planes + plane, 4)
                    for t, x in enumerate(xs):
                        if (t, vector_idx) not in loaded:
                            loaded[t, vector_idx] = load(builder, offset(builder, x, 16 * vector_idx), v4i)
                        four = loaded[t, vector_idx]
                        value = builder.bitcast(emit.shuffle(builder, four, four, [lane] * 4), v16b)
                        arguments = [sums[t][plane], taken, value]
                        sums[t][plane] = emit.call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", v4i, arguments)

        quarters.append(
            _part_dots(builder, _nibble_passes(codes), lambda: [[constant(v4i, 0)] * planes for _ in xs], add)
        )
    return [
        [emit.join(builder, [quarter[t][p] for quarter in quarters]) for p in range(planes)] for t in range(len(xs))
    ]


_GROUP_DOTS = {"avx512_vnni": _group_dots_vnni, "avx2": _group_dots_avx2, "neon_dot": _group_dots_neon}


def _planes_to_float(builder: Any, dots: Sequence[Any]) -> Any:
    """The group's dot product in units of the activation scale, float32."""
    if len(dots) == 1:
        return builder.sitofp(dots[0], V16F)
    low = builder.add(builder.shl(dots[-2], constant(V16I, 8)), dots[-1])
    value = builder.sitofp(low, V16F)
    if len(dots) == 2:
        return value
    return emit.fma(builder, builder.sitofp(dots[0], V16F), constant(V16F, 65536.0), value)


# ---- float dot products of one group (generic)


def _fp4_floats(builder: Any, codes: Any) -> Any:
    """E2M1 codes in int32 lanes -> 2 * value + 12 as float32: below 1 the exponent is that of 1, without the hidden bit."""
    one = constant(V16I, 1)
    exponent, mantissa = builder.and_(builder.lshr(codes, one), constant(V16I, 3)), builder.and_(codes, one)
    shift = builder.sub(exponent, builder.select(builder.icmp_signed(">", exponent, constant(V16I, 0)), one, exponent))
    hidden = builder.select(builder.icmp_signed(">", exponent, constant(V16I, 0)), constant(V16I, 2), constant(V16I, 0))
    magnitude = builder.shl(builder.or_(mantissa, hidden), shift)
    negative = builder.icmp_signed(">", codes, constant(V16I, 7))
    signed = builder.select(negative, builder.sub(constant(V16I, 0), magnitude), magnitude)
    return builder.sitofp(builder.add(signed, constant(V16I, 12)), V16F)


def _group_dots_float(builder: Any, words: Any, xs: Sequence[Any], codes: _Codes) -> list[Any]:
    """Sum of code * x of one group, columns in ascending order."""
    sums = [constant(V16F, 0.0)] * len(xs)
    for column in range(codes.group):
        unit, byte = column // 8 * 2 + column % 2, column % 8 // 2
        found = _unit_codes(builder, lambda index: load(builder, offset(builder, words, 64 * index), V16I), codes, unit)
        shifted = builder.lshr(found, constant(V16I, 8 * byte)) if byte else found
        code = builder.and_(shifted, constant(V16I, 255))
        value = _fp4_floats(builder, code) if codes.is_fp4 else builder.sitofp(code, V16F)
        for t, x in enumerate(xs):
            sums[t] = emit.fma(
                builder, value, splat(builder, load(builder, offset(builder, x, 4 * column), F32)), sums[t]
            )
    return sums


# ---- scales of one byte


def _e4m3_to_half(builder: Any, high: Any) -> Any:
    """int16 lanes with E4M3 codes in their high bytes (anything in the low ones) -> IEEE halves of value / 256."""
    return builder.and_(builder.ashr(high, constant(high.type, 1)), constant(high.type, 0xBF80 - 0x10000))


def _byte_scales(builder: Any, address: Any, kind: str) -> Any:
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


# ---- whole tiles


class _Tile:
    """What all tiles share: token addresses, accumulators, the loop over steps, the stores."""

    def __init__(self, builder: Any, args: Sequence[Any], num_tokens: int, chains: int) -> None:
        self.builder = builder
        self.weights, self.xs, self.ys, self.y_offset, self.num_steps = args[:5]
        self.num_tokens = num_tokens
        self.rows = [self._entry(self.xs, t) for t in range(num_tokens)]
        zero = constant(V16F, 0.0)
        self.accs = [[cgutils.alloca_once_value(builder, zero) for _ in range(chains)] for _ in range(num_tokens)]

    def _entry(self, table: Any, t: int) -> Any:
        return load(self.builder, offset(self.builder, table, 8 * t), I64, align=8)

    def each_step(self, body: Callable[[Any, list[Any], Any], None], step_bytes: int, row_bytes: int) -> None:
        """body(address of the weights, addresses of the tokens' activations, number of the step) for each step."""
        with cgutils.for_range(self.builder, self.num_steps, intp=I64) as loop:
            body(*self.at_step(loop.index, step_bytes, row_bytes), loop.index)

    def at_step(self, index: Any, step_bytes: int, row_bytes: int) -> tuple[Any, list[Any]]:
        """Addresses of the weights and of the tokens' activations of a step."""
        builder = self.builder
        moved = builder.mul(index, constant(I64, row_bytes))
        weights = builder.add(self.weights, builder.mul(index, constant(I64, step_bytes)))
        return weights, [builder.add(row, moved) for row in self.rows]

    def scales(self, step_bytes: int) -> Any:
        """Address of the scales that follow all the codes of the block."""
        return self.builder.add(self.weights, self.builder.mul(self.num_steps, constant(I64, step_bytes)))

    def store(self, values: Sequence[Any]) -> None:
        for t, value in enumerate(values):
            emit.store(self.builder, value, self.builder.add(self._entry(self.ys, t), self.y_offset))


def _emit_quantised(builder: Any, args: Sequence[Any], matrix_format: Format, planes: int, num_tokens: int) -> None:
    codes = _codes_of(matrix_format)
    tile = _Tile(builder, args, num_tokens, chains=1)
    record, step_bytes = group_record_bytes(codes.group, planes), geometry(matrix_format, codes.group).step_bytes

    def factors(weights: Any, index: Any) -> tuple[Any, Any]:
        """Scales and biases."""
        if codes.is_fp4:
            place = builder.add(tile.scales(step_bytes), builder.mul(index, constant(I64, 16)))
            halves = builder.fmul(_byte_scales(builder, place, matrix_format.scale), constant(V16F, 0.5))
            return halves, builder.fmul(halves, constant(V16F, -12.0))
        element, is_bf16 = ELEMENT_BYTES[matrix_format.scale], matrix_format.scale == "bf16"
        place = offset(builder, weights, codes.group * codes.bits * 2)
        scales = emit.load_scales(builder, place, element, is_bf16)
        return scales, emit.load_scales(builder, offset(builder, place, 16 * element), element, is_bf16)

    def step(weights: Any, rows: list[Any], index: Any) -> None:
        if USES_PLANES:
            dots = _GROUP_DOTS[ISA](builder, weights, rows, codes, planes)
            sums = [_planes_to_float(builder, token) for token in dots]
        else:
            sums = _group_dots_float(builder, weights, rows, codes)
        scales, biases = factors(weights, index)
        for t, row in enumerate(rows):
            factor = scales
            if USES_PLANES:
                factor = builder.fmul(scales, splat(builder, load(builder, offset(builder, row, record - 8), F32)))
            total = splat(builder, load(builder, offset(builder, row, record - 4), F32))
            acc = emit.fma(builder, sums[t], factor, builder.load(tile.accs[t][0]))
            builder.store(emit.fma(builder, biases, total, acc), tile.accs[t][0])

    tile.each_step(step, step_bytes, record)
    tile.store([builder.load(acc[0]) for acc in tile.accs])


_FP8_CHAINS = 4
"""Sums of a group: a single token would wait for each addition."""


def _emit_fp8(builder: Any, args: Sequence[Any], matrix_format: Format, num_tokens: int) -> None:
    """A group at a time; the last tile of a row may have fewer steps."""
    tile = _Tile(builder, args, num_tokens, chains=1)
    step_bytes, steps = DENSE_STEP * 16, matrix_format.group_size // DENSE_STEP
    zero, scales = constant(V16F, 0.0), tile.scales(step_bytes)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(_FP8_CHAINS)] for _ in range(num_tokens)]

    def step(index: Any) -> None:
        weights, rows = tile.at_step(index, step_bytes, 4 * DENSE_STEP)
        held = [[builder.load(chain) for chain in token] for token in sums]
        for column, values in enumerate(_fp8_columns(builder, weights)):
            for t, row in enumerate(rows):
                x = splat(builder, load(builder, offset(builder, row, 4 * column), F32))
                held[t][column % _FP8_CHAINS] = emit.fma(builder, values, x, held[t][column % _FP8_CHAINS])
        for token, kept in zip(held, sums, strict=True):
            for value, chain in zip(token, kept, strict=True):
                builder.store(value, chain)

    last = constant(I64, steps - 1)
    num_groups = builder.sdiv(builder.add(tile.num_steps, last), constant(I64, steps))
    with cgutils.for_range(builder, num_groups, intp=I64) as loop:
        first = builder.mul(loop.index, constant(I64, steps))
        if matrix_format.scale == "tile":
            rest = builder.sub(tile.num_steps, first)
            count = builder.select(builder.icmp_signed("<", rest, constant(I64, steps)), rest, constant(I64, steps))
            with cgutils.for_range(builder, count, intp=I64) as inner:
                step(builder.add(first, inner.index))
            place = builder.add(scales, builder.mul(loop.index, constant(I64, 4)))
            factor = splat(builder, load(builder, place, F32))
        else:
            for i in range(steps):
                step(offset(builder, first, i))
            place = builder.add(scales, builder.mul(loop.index, constant(I64, 16)))
            factor = _byte_scales(builder, place, matrix_format.scale)
        factor = builder.fmul(factor, constant(V16F, 256.0))
        for token, accs in zip(sums, tile.accs, strict=True):
            a, b, c, d = (builder.load(chain) for chain in token)
            total = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
            builder.store(emit.fma(builder, total, factor, builder.load(accs[0])), accs[0])
            for chain in token:
                builder.store(zero, chain)
    tile.store([builder.load(acc[0]) for acc in tile.accs])


def _fp8_columns(builder: Any, weights: Any) -> list[Any]:
    """Value / 256 of the 8 columns of a step, float32: pairs of columns share an int16, the first in its low byte."""
    columns = []
    for half in range(2):
        pairs = load(builder, offset(builder, weights, 64 * half), vector(I16, 32))
        first = _e4m3_to_half(builder, builder.shl(pairs, constant(pairs.type, 8)))
        parts = zip(emit.split(builder, first, 2), emit.split(builder, _e4m3_to_half(builder, pairs), 2), strict=True)
        columns += [emit.f16_to_f32(builder, part) for pair in parts for part in pair]
    return columns


def _emit_dense(builder: Any, args: Sequence[Any], matrix_format: Format, num_tokens: int) -> None:
    """Two sums, over even and odd columns, so that a single token does not wait for each addition."""
    element = ELEMENT_BYTES[matrix_format.kind]
    tile = _Tile(builder, args, num_tokens, chains=2)

    def step(weights: Any, rows: list[Any], _index: Any) -> None:
        accs = [[builder.load(acc) for acc in token] for token in tile.accs]
        for column in range(DENSE_STEP):
            at = offset(builder, weights, 16 * element * column)
            values = emit.load_scales(builder, at, element, matrix_format.kind == "bf16")
            for t, row in enumerate(rows):
                x = splat(builder, load(builder, offset(builder, row, 4 * column), F32))
                accs[t][column % 2] = emit.fma(builder, values, x, accs[t][column % 2])
        for t, token in enumerate(accs):
            for acc, slot in zip(token, tile.accs[t], strict=True):
                builder.store(acc, slot)

    tile.each_step(step, geometry(matrix_format, DENSE_STEP).step_bytes, 4 * DENSE_STEP)
    tile.store([builder.fadd(builder.load(even), builder.load(odd)) for even, odd in tile.accs])


_KINDS = ("q2", "q3", "q4", "q5", "q6", "q8", "fp4", "fp8", "bf16", "f16", "f32")
_SCALES = ("", "bf16", "f16", "f32", "e8m0", "e4m3", "tile")


@operation(types.void, *[types.int64] * 5, num_literals=5)
def _tile(
    builder: Any, weights: Any, xs: Any, ys: Any, y_offset: Any, num_steps: Any,
    kind: int, group_size: int, scale: int, planes: int, num_tokens: int,
) -> None:  # fmt: skip
    matrix_format = Format(_KINDS[kind], group_size, _SCALES[scale])  # type: ignore[arg-type]  # by construction
    arguments = (weights, xs, ys, y_offset, num_steps)
    if uses_groups(matrix_format):
        _emit_quantised(builder, arguments, matrix_format, planes, num_tokens)
    elif group_size:
        _emit_fp8(builder, arguments, matrix_format, num_tokens)
    else:
        _emit_dense(builder, arguments, matrix_format, num_tokens)


def _make(kind: int, group_size: int, scale: int, planes: int, num_tokens: int) -> Native:
    def tile_kernel(weights: int, xs: int, ys: int, y_offset: int, num_steps: int) -> None:
        _tile(weights, xs, ys, y_offset, num_steps, kind, group_size, scale, planes, num_tokens)

    return Native(tile_kernel)


class TileKernels(NamedTuple):
    """The kernels of one format, compiled when their addresses are asked for."""

    tile: Native
    """TILE_TOKENS tokens."""
    single: Native
    """One token."""


@cache
def tile_kernels(matrix_format: Format, planes: int) -> TileKernels:
    """The kernels of a format; `planes` says nothing for dense formats, fp8 and on the generic instruction set."""
    kind, scale = _KINDS.index(matrix_format.kind), _SCALES.index(matrix_format.scale)
    planes = planes if uses_groups(matrix_format) and USES_PLANES else 0
    return TileKernels(*(_make(kind, matrix_format.group_size, scale, planes, width) for width in (TILE_TOKENS, 1)))
