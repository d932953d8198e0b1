"""The inner loops of latent attention: scores of positions, and weighted sums of latents, for WIDTH query vectors at once.

Many heads read the same rows, so these are bound by arithmetic: VECTORS vectors of keys or values meet WIDTH queries, as many sums as
registers hold with room for what is loaded. The width changes no result: every lane of every query has its own chain of operations, in
ascending order. Layouts:

    rows     [P / 16][16 positions][16 elements]    a tile of `latent_cache`
    keys     [P][VECTORS * 16 positions]             tiles turned by `turn_part`
    queries  [P][WIDTH]                              packed, so that the next query is 4 bytes away
    scores   [WIDTH][SCORE_STRIDE]
    sums     [parts][WIDTH][16 elements]
"""

from typing import Any

from numba import types
from numba.core import cgutils

from colibri_mp.kernels import emit
from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, accumulators, prefetch
from colibri_mp.kernels.emit import F32, I8, I64, LANES, V16F, constant
from colibri_mp.kernels.jit import operation
from colibri_mp.kernels.vectors import vector16

WIDTH, VECTORS = (8, 2) if emit.ISA == "avx512_vnni" else (4, 1)
VECTOR_BYTES = 4 * LANES
PART_BYTES = LANES * VECTOR_BYTES
"""16 elements of 16 positions."""
_UNROLL = 4  # widths are multiples of 16


@operation(types.void, *[types.int64] * 2)
def turn_part(builder: Any, rows: Any, keys: Any) -> None:
    """keys[element][position] = rows[position][element] for 16 by 16; the rows of keys are VECTORS vectors apart."""
    vectors = [emit.load(builder, emit.offset(builder, rows, p * VECTOR_BYTES), V16F, 64) for p in range(LANES)]
    bit = 1
    while bit < LANES:  # exchange this bit of the number of the vector with that of the lane
        low = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
        high = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
        for first in range(LANES):
            if not first & bit:
                a, b = vectors[first], vectors[first + bit]
                vectors[first] = emit.shuffle(builder, a, b, low)
                vectors[first + bit] = emit.shuffle(builder, a, b, high)
        bit *= 2
    for element, value in enumerate(vectors):
        emit.store(builder, value, emit.offset(builder, keys, element * VECTORS * VECTOR_BYTES), 64)


def _multiply(builder: Any, sums: list[list[Any]], scalars: list[Any], vectors: list[Any]) -> None:
    """sums[i][n] += scalar i * vector n; scalars are addresses."""
    for place, scalar in zip(sums, scalars, strict=True):
        factor = emit.splat(builder, emit.load(builder, scalar, F32))
        for total, value in zip(place, vectors, strict=True):
            builder.store(emit.fma(builder, factor, value, builder.load(total)), total)


@operation(types.void, *[types.int64] * 5)
def score_tiles(builder: Any, queries: Any, keys: Any, scores: Any, width: Any, later: Any) -> None:
    """scores[i][0 .. VECTORS * 16 - 1] = sum over d < width of queries[d][i] * keys[d], d ascending; width a multiple of 16.

    Prefetches `width` vectors at `later`: a tile.
    """
    sums = [accumulators(builder, VECTORS) for _ in range(WIDTH)]
    for places in sums:
        for place in places:
            builder.store(constant(V16F, 0.0), place)
    with cgutils.for_range(builder, builder.sdiv(width, constant(I64, _UNROLL)), intp=I64) as loop:
        key = builder.add(keys, builder.mul(loop.index, constant(I64, _UNROLL * VECTORS * VECTOR_BYTES)))
        query = builder.add(queries, builder.mul(loop.index, constant(I64, _UNROLL * WIDTH * 4)))
        line = builder.add(later, builder.mul(loop.index, constant(I64, _UNROLL * VECTOR_BYTES)))
        for step in range(_UNROLL):
            first = step * VECTORS
            vectors = [
                emit.load(builder, emit.offset(builder, key, (first + n) * VECTOR_BYTES), V16F, 64)
                for n in range(VECTORS)
            ]
            scalars = [emit.offset(builder, query, (step * WIDTH + i) * 4) for i in range(WIDTH)]
            prefetch(builder, emit.offset(builder, line, step * VECTOR_BYTES))
            _multiply(builder, sums, scalars, vectors)
    for i, places in enumerate(sums):
        for n, place in enumerate(places):
            at = emit.offset(builder, scores, i * SCORE_STRIDE * 4 + n * VECTOR_BYTES)
            emit.store(builder, builder.load(place), at, 64)


@operation(types.void, *[types.int64] * 5)
def mix_parts(builder: Any, weights: Any, values: Any, sums: Any, num_positions: Any, later: Any) -> None:
    """sums[n][i] += sum over positions p < num_positions (1 .. 16) of weights[i][p] * values[n][p], p ascending; n < VECTORS parts.

    `weights` are scores that were exponentiated, with the same strides. Prefetches as much at `later` as it reads of the values.
    """
    places = [accumulators(builder, VECTORS) for _ in range(WIDTH)]

    def at(i: int, n: int) -> Any:
        return emit.offset(builder, sums, (n * WIDTH + i) * VECTOR_BYTES)

    for i in range(WIDTH):
        for n in range(VECTORS):
            builder.store(emit.load(builder, at(i, n), V16F, 64), places[i][n])
    with cgutils.for_range(builder, num_positions, intp=I64) as loop:
        value = builder.add(values, builder.mul(loop.index, constant(I64, VECTOR_BYTES)))
        weight = builder.add(weights, builder.mul(loop.index, constant(I64, 4)))
        line = builder.add(later, builder.mul(loop.index, constant(I64, VECTOR_BYTES)))
        for n in range(VECTORS):
            prefetch(builder, emit.offset(builder, line, n * PART_BYTES))
        vectors = [emit.load(builder, emit.offset(builder, value, n * PART_BYTES), V16F, 64) for n in range(VECTORS)]
        scalars = [emit.offset(builder, weight, i * SCORE_STRIDE * 4) for i in range(WIDTH)]
        _multiply(builder, places, scalars, vectors)
    for i in range(WIDTH):
        for n in range(VECTORS):
            emit.store(builder, builder.load(places[i][n]), at(i, n), 64)


@operation(vector16, types.int64)
def load_codes16(builder: Any, address: Any) -> Any:
    """16 int8 as float32, exact."""
    return builder.sitofp(emit.load(builder, address, emit.vector(I8), 16), V16F)
