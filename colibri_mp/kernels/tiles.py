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

No overflow: |dot| <= 128 columns * 255 * 128 = 4,177,920 = A, and |dot[1] * 256 + dot[2]| <= 257 A = 1,073,725,440 < 2^31.
The hardware: `vpdpbusd` (u8 x s8, four products into int32, no saturation). `vpmaddubsw` adds pairs of products in int16 *with*
saturation: a 4-bit code gives at most 2 * 15 * 128 = 3840, and 8 such are summed in int16, 30,720 <= 32,767, before they are
widened; 8-bit codes are taken as two nibbles, high ones first, shifted by 4. `sdot` is s8 x s8: nibbles again.

On the generic set, and for dense formats, everything is float32: products with the activations themselves, columns in ascending order.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils

from colibri_mp.formats import ELEMENT_BYTES, Format
from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I8, I16, I32, I64, ISA, V16F, V16I, constant, load, offset, splat, vector
from colibri_mp.kernels.jit import Native, operation
from colibri_mp.kernels.layout import DENSE_STEP, code_bits, geometry

USES_PLANES = ISA != "generic"
TILE_TOKENS = 4
"""Tokens of a wide tile (8 gained nothing on Zen 4, 2 lost 10 % with AVX2). Other counts are made of these and single tokens."""


def group_record_bytes(group_size: int, planes: int) -> int:
    """Bytes that one group takes in a prepared row: the columns, then float32 scale and sum."""
    return (planes if USES_PLANES else 4) * group_size + 8


# ---- integer dot products of one group


def _unit_codes(builder: Any, word: Any, bits: int, shift: int) -> Any:
    """The bytes of a word that one dot product takes: all of a q8 word, or every other nibble."""
    if bits == 8 and shift < 0:
        return word
    shifted = builder.lshr(word, constant(word.type, shift)) if shift > 0 else word
    return builder.and_(shifted, constant(word.type, 0x0F0F0F0F))


def _group_dots_vnni(
    builder: Any, words: Any, xs: Sequence[Any], bits: int, group: int, planes: int
) -> list[list[Any]]:
    """dot[token][plane] of one group. Few accumulators would wait for each other: integers may be summed in any order."""
    chains = 2 if len(xs) * planes < 8 else 1
    accs = [[[constant(V16I, 0)] * chains for _ in range(planes)] for _ in xs]
    for unit in range(group // 4):
        word = load(builder, offset(builder, words, 64 * (unit * bits // 8)), V16I)
        codes = _unit_codes(builder, word, bits, -1 if bits == 8 else 4 * (unit % 2))
        for plane in range(planes):
            for t, x in enumerate(xs):
                value = splat(builder, load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32))
                acc = accs[t][plane]
                arguments = [acc[unit % chains], codes, value]
                acc[unit % chains] = emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", V16I, arguments)
    return [[acc[0] if chains == 1 else builder.add(acc[0], acc[1]) for acc in token] for token in accs]


def _nibble_passes(bits: int, group: int) -> list[list[tuple[int, int, int]]]:
    """(word, shift, unit) of each dot product; one pass over 4-bit codes, two (high, low nibbles) over 8-bit ones."""
    if bits == 4:
        return [[(unit // 2, 4 * (unit % 2), unit) for unit in range(group // 4)]]
    return [[(unit, shift, unit) for unit in range(group // 4)] for shift in (4, 0)]


def _part_dots(builder: Any, passes: Any, new_sums: Callable[[], Any], add: Callable[..., None]) -> list[list[Any]]:
    """Run the passes over one part of the lanes; between them the sums are shifted by a nibble."""
    sums = new_sums()
    for index, units in enumerate(passes):
        if index:
            sums = [[builder.shl(s, constant(s.type, 4)) for s in token] for token in sums]
        add(sums, units)
    return sums  # type: ignore[no-any-return]  # LLVM values are untyped


def _group_dots_avx2(
    builder: Any, words: Any, xs: Sequence[Any], bits: int, group: int, planes: int
) -> list[list[Any]]:
    """dot[token][plane], 8 rows at a time: twice as many tokens fit into the 16 registers."""
    v8i, v16s, v32b = vector(I32, 8), vector(I16, 16), vector(I8, 32)
    halves = []
    for half in range(2):

        def add(sums: Any, units: Any, half: int = half) -> None:
            for start in range(0, len(units), 8):  # 8 sums of two products fit into int16
                partial: dict[tuple[int, int], Any] = {}
                for word, shift, unit in units[start : start + 8]:
                    bits32 = load(builder, offset(builder, words, 64 * word + 32 * half), v8i)
                    codes = builder.bitcast(_unit_codes(builder, bits32, bits, shift), v32b)
                    for plane in range(planes):
                        for t, x in enumerate(xs):
                            value = load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32)
                            value = builder.bitcast(splat(builder, value, 8), v32b)
                            product = emit.call(builder, "llvm.x86.avx2.pmadd.ub.sw", v16s, [codes, value])
                            before = partial.get((t, plane))
                            partial[t, plane] = product if before is None else builder.add(before, product)
                for (t, plane), value in partial.items():
                    wide = emit.call(builder, "llvm.x86.avx2.pmadd.wd", v8i, [value, constant(v16s, 1)])
                    sums[t][plane] = builder.add(sums[t][plane], wide)

        halves.append(
            _part_dots(builder, _nibble_passes(bits, group), lambda: [[constant(v8i, 0)] * planes for _ in xs], add)
        )
    return [[emit.join(builder, [half[t][p] for half in halves]) for p in range(planes)] for t in range(len(xs))]


def _group_dots_neon(
    builder: Any, words: Any, xs: Sequence[Any], bits: int, group: int, planes: int
) -> list[list[Any]]:
    """dot[token][plane], 4 rows at a time; four activations a load, `sdot` picks one of them."""
    v4i, v16b = vector(I32, 4), vector(I8, 16)
    quarters = []
    for quarter in range(4):

        def add(sums: Any, units: Any, quarter: int = quarter) -> None:
            loaded: dict[tuple[int, int], Any] = {}
            for word, shift, unit in units:
                bits32 = load(builder, offset(builder, words, 64 * word + 16 * quarter), v4i)
                codes = builder.bitcast(_unit_codes(builder, bits32, bits, shift), v16b)
                for plane in range(planes):
                    vector_idx, lane = divmod(unit * planes + plane, 4)
                    for t, x in enumerate(xs):
                        if (t, vector_idx) not in loaded:
                            loaded[t, vector_idx] = load(builder, offset(builder, x, 16 * vector_idx), v4i)
                        four = loaded[t, vector_idx]
                        value = builder.bitcast(emit.shuffle(builder, four, four, [lane] * 4), v16b)
                        arguments = [sums[t][plane], codes, value]
                        sums[t][plane] = emit.call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", v4i, arguments)

        quarters.append(
            _part_dots(builder, _nibble_passes(bits, group), lambda: [[constant(v4i, 0)] * planes for _ in xs], add)
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


def _group_dots_float(builder: Any, words: Any, xs: Sequence[Any], bits: int, group: int) -> list[Any]:
    """Sum of code * x of one group, columns in ascending order."""
    sums = [constant(V16F, 0.0)] * len(xs)
    for column in range(group):
        if bits == 4:
            word, shift = column // 8, 4 * (column % 8)
        else:
            word, shift = column // 8 * 2 + column % 2, 8 * (column % 8 // 2)
        packed = load(builder, offset(builder, words, 64 * word), V16I)
        shifted = builder.lshr(packed, constant(V16I, shift)) if shift else packed
        code = builder.sitofp(builder.and_(shifted, constant(V16I, 2**bits - 1)), V16F)
        for t, x in enumerate(xs):
            sums[t] = emit.fma(
                builder, code, splat(builder, load(builder, offset(builder, x, 4 * column), F32)), sums[t]
            )
    return sums


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

    def each_step(self, body: Callable[[Any, list[Any]], None], step_bytes: int, row_bytes: int) -> None:
        """body(address of the weights, addresses of the tokens' activations) for each step."""
        builder = self.builder
        with cgutils.for_range(builder, self.num_steps, intp=I64) as loop:
            weights = builder.add(self.weights, builder.mul(loop.index, constant(I64, step_bytes)))
            moved = builder.mul(loop.index, constant(I64, row_bytes))
            body(weights, [builder.add(row, moved) for row in self.rows])

    def store(self, values: Sequence[Any]) -> None:
        for t, value in enumerate(values):
            emit.store(self.builder, value, self.builder.add(self._entry(self.ys, t), self.y_offset))


def _emit_quantised(builder: Any, args: Sequence[Any], matrix_format: Format, planes: int, num_tokens: int) -> None:
    bits, group = code_bits(matrix_format), matrix_format.group_size
    element = ELEMENT_BYTES[matrix_format.scale]
    tile = _Tile(builder, args, num_tokens, chains=1)
    scales_at = group * bits * 2
    record = group_record_bytes(group, planes)

    def step(weights: Any, rows: list[Any]) -> None:
        if USES_PLANES:
            dots = _GROUP_DOTS[ISA](builder, weights, rows, bits, group, planes)
            sums = [_planes_to_float(builder, token) for token in dots]
        else:
            sums = _group_dots_float(builder, weights, rows, bits, group)
        is_bf16 = matrix_format.scale == "bf16"
        scales = emit.load_scales(builder, offset(builder, weights, scales_at), element, is_bf16)
        biases = emit.load_scales(builder, offset(builder, weights, scales_at + 16 * element), element, is_bf16)
        for t, row in enumerate(rows):
            factor = scales
            if USES_PLANES:
                factor = builder.fmul(scales, splat(builder, load(builder, offset(builder, row, record - 8), F32)))
            total = splat(builder, load(builder, offset(builder, row, record - 4), F32))
            acc = emit.fma(builder, sums[t], factor, builder.load(tile.accs[t][0]))
            builder.store(emit.fma(builder, biases, total, acc), tile.accs[t][0])

    tile.each_step(step, geometry(matrix_format, group).step_bytes, record)
    tile.store([builder.load(acc[0]) for acc in tile.accs])


def _emit_dense(builder: Any, args: Sequence[Any], matrix_format: Format, num_tokens: int) -> None:
    """Two sums, over even and odd columns, so that a single token does not wait for each addition."""
    element = ELEMENT_BYTES[matrix_format.kind]
    tile = _Tile(builder, args, num_tokens, chains=2)

    def step(weights: Any, rows: list[Any]) -> None:
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


_KINDS = ("q4", "q8", "bf16", "f16", "f32")
_SCALES = ("", "bf16", "f16", "f32")


@operation(types.void, *[types.int64] * 5, num_literals=5)
def _tile(
    builder: Any, weights: Any, xs: Any, ys: Any, y_offset: Any, num_steps: Any,
    kind: int, group_size: int, scale: int, planes: int, num_tokens: int,
) -> None:  # fmt: skip
    matrix_format = Format(_KINDS[kind], group_size, _SCALES[scale])  # type: ignore[arg-type]  # by construction
    arguments = (weights, xs, ys, y_offset, num_steps)
    if group_size:
        _emit_quantised(builder, arguments, matrix_format, planes, num_tokens)
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
    """The kernels of a format; `planes` says nothing for dense formats and on the generic instruction set."""
    kind, scale = _KINDS.index(matrix_format.kind), _SCALES.index(matrix_format.scale)
    planes = planes if matrix_format.group_size and USES_PLANES else 0
    return TileKernels(*(_make(kind, matrix_format.group_size, scale, planes, width) for width in (TILE_TOKENS, 1)))
