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

Symmetric weights are the same with bias = -8 * scale (8 bits: -128 * scale); where a row has one scale, it multiplies the sum at the end.
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

from numba import types
from numba.core import cgutils

from colibri_mp.formats import ELEMENT_BYTES, Format
from colibri_mp.kernels import emit
from colibri_mp.kernels.codes import byte_scales, codes_of, fp8_columns
from colibri_mp.kernels.emit import F32, I64, ISA, V16F, constant, load, offset, splat
from colibri_mp.kernels.group_dots import GROUP_DOTS, group_dots_float, planes_to_float
from colibri_mp.kernels.jit import Native, operation
from colibri_mp.kernels.layout import DENSE_STEP, LINE_BYTES, geometry, groups_a_line, uses_groups

USES_PLANES = ISA != "generic"
TILE_TOKENS = 4
"""Tokens of a wide tile (8 gained nothing on Zen 4, 2 lost 10 % with AVX2). Other counts are made of these and single tokens."""


def group_record_bytes(group_size: int, planes: int) -> int:
    """Bytes that one group takes in a prepared row: the columns, then float32 scale and sum."""
    return (planes if USES_PLANES else 4) * group_size + 8


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

    def end(self, step_bytes: int) -> Any:
        """Address of what follows the last step."""
        return self.builder.add(self.weights, self.builder.mul(self.num_steps, constant(I64, step_bytes)))

    def in_lines(self, group: Any, matrix_format: Format, group_bytes: int) -> tuple[Any, Any]:
        """Addresses of the codes and of the scales of a group of fp4 or fp8, whose codes take so many bytes."""
        builder, groups = self.builder, groups_a_line(matrix_format)
        line = builder.lshr(group, constant(I64, groups.bit_length() - 1))
        before = builder.mul(line, constant(I64, LINE_BYTES))
        codes = builder.add(builder.add(self.weights, before), builder.mul(group, constant(I64, group_bytes)))
        first = builder.add(builder.add(self.weights, before), builder.mul(line, constant(I64, groups * group_bytes)))
        place = builder.mul(builder.and_(group, constant(I64, groups - 1)), constant(I64, LINE_BYTES // groups))
        return offset(builder, codes, LINE_BYTES), builder.add(first, place)

    def store(self, values: Sequence[Any]) -> None:
        for t, value in enumerate(values):
            emit.store(self.builder, value, self.builder.add(self._entry(self.ys, t), self.y_offset))


def _emit_quantised(builder: Any, args: Sequence[Any], matrix_format: Format, planes: int, num_tokens: int) -> None:
    codes = codes_of(matrix_format)
    tile = _Tile(builder, args, num_tokens, chains=1)
    record, step_bytes = group_record_bytes(codes.group, planes), geometry(matrix_format, codes.group).step_bytes

    def factors(weights: Any, index: Any) -> tuple[Any, Any]:
        """Scales and biases; of rows those of the codes alone."""
        middle = -float(2 ** (codes.bits - 1))
        if matrix_format.scale == "row":
            return constant(V16F, 1.0), constant(V16F, middle)
        if codes.is_fp4:
            _, place = tile.in_lines(index, matrix_format, step_bytes)
            halves = builder.fmul(byte_scales(builder, place, matrix_format.scale), constant(V16F, 0.5))
            return halves, builder.fmul(halves, constant(V16F, -12.0))
        place = offset(builder, weights, codes.group * codes.bits * 2)
        if matrix_format.scale == "symmetric":
            scales = load(builder, place, V16F)
            return scales, builder.fmul(scales, constant(V16F, middle))
        element, is_bf16 = ELEMENT_BYTES[matrix_format.scale], matrix_format.scale == "bf16"
        scales = emit.load_scales(builder, place, element, is_bf16)
        return scales, emit.load_scales(builder, offset(builder, place, 16 * element), element, is_bf16)

    def step(weights: Any, rows: list[Any], index: Any) -> None:
        if codes.is_fp4:
            weights, _ = tile.in_lines(index, matrix_format, step_bytes)
        if USES_PLANES:
            dots = GROUP_DOTS[ISA](builder, weights, rows, codes, planes)
            sums = [planes_to_float(builder, token) for token in dots]
        else:
            sums = group_dots_float(builder, weights, rows, codes)
        scales, biases = factors(weights, index)
        for t, row in enumerate(rows):
            factor = scales
            if USES_PLANES:
                factor = builder.fmul(scales, splat(builder, load(builder, offset(builder, row, record - 8), F32)))
            total = splat(builder, load(builder, offset(builder, row, record - 4), F32))
            acc = emit.fma(builder, sums[t], factor, builder.load(tile.accs[t][0]))
            builder.store(emit.fma(builder, biases, total, acc), tile.accs[t][0])

    tile.each_step(step, step_bytes, record)
    results = [builder.load(acc[0]) for acc in tile.accs]
    if matrix_format.scale == "row":
        scales = load(builder, tile.end(step_bytes), V16F)
        results = [builder.fmul(result, scales) for result in results]
    tile.store(results)


_FP8_CHAINS = 4
"""Sums of a group: a single token would wait for each addition."""


def _emit_fp8(builder: Any, args: Sequence[Any], matrix_format: Format, num_tokens: int) -> None:
    """A group at a time; the last tile of a row may have fewer steps."""
    tile = _Tile(builder, args, num_tokens, chains=1)
    step_bytes, steps = DENSE_STEP * 16, matrix_format.group_size // DENSE_STEP
    zero = constant(V16F, 0.0)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(_FP8_CHAINS)] for _ in range(num_tokens)]

    def step(codes: Any, index: Any, number: Any) -> None:
        """The step `number` of a group, the step `index` of all."""
        _, rows = tile.at_step(index, step_bytes, 4 * DENSE_STEP)
        weights = builder.add(codes, builder.mul(number, constant(I64, step_bytes)))
        held = [[builder.load(chain) for chain in token] for token in sums]
        for column, values in enumerate(fp8_columns(builder, weights)):
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
        codes, place = tile.in_lines(loop.index, matrix_format, step_bytes * steps)
        if matrix_format.scale == "tile":
            rest = builder.sub(tile.num_steps, first)
            count = builder.select(builder.icmp_signed("<", rest, constant(I64, steps)), rest, constant(I64, steps))
            with cgutils.for_range(builder, count, intp=I64) as inner:
                step(codes, builder.add(first, inner.index), inner.index)
            factor = splat(builder, load(builder, place, F32))
        else:
            for i in range(steps):
                step(codes, offset(builder, first, i), constant(I64, i))
            factor = byte_scales(builder, place, matrix_format.scale)
        factor = builder.fmul(factor, constant(V16F, 256.0))
        for token, accs in zip(sums, tile.accs, strict=True):
            a, b, c, d = (builder.load(chain) for chain in token)
            total = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
            builder.store(emit.fma(builder, total, factor, builder.load(accs[0])), accs[0])
            for chain in token:
                builder.store(zero, chain)
    tile.store([builder.load(acc[0]) for acc in tile.accs])


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
_SCALES = ("", "bf16", "f16", "f32", "e8m0", "e4m3", "tile", "symmetric", "row")


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
