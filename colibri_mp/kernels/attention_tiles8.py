"""`attention_tiles` for a cache of int8 codes with scales (`kv_cache8`): the same chains of operations on converted codes.

Scores are scaled once a position, after the sum over its elements; of values the weight is scaled, not the sixteen elements.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from colibri_mp.kernels import emit
from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, accumulate, accumulators, prefetch
from colibri_mp.kernels.emit import F32, I8, I64, LANES, V16F, constant
from colibri_mp.kernels.jit import operation

_VECTOR_BYTES = 4 * LANES
_CODES = emit.vector(I8)
_UNROLL = 2  # head_dim is even


def _load_codes(builder: Any, address: Any) -> Any:
    """16 int8 as float32, exact."""
    return builder.sitofp(emit.load(builder, address, _CODES, 16), V16F)


@operation(types.void, *[types.int64] * 5, num_literals=1)
def score_tile8(builder: Any, queries: Any, keys: Any, scores: Any, head_dim: Any, next_keys: Any, width: int) -> None:
    """scores[i][0..15] = (sum over d of queries[d][i] * codes[d][0..15]) * scales[0..15], d ascending; prefetches what comes next."""
    sums = accumulators(builder, width)
    for place in sums:
        builder.store(constant(V16F, 0.0), place)
    with cgutils.for_range(builder, builder.sdiv(head_dim, constant(I64, _UNROLL)), intp=I64) as loop:
        row = builder.mul(loop.index, constant(I64, _UNROLL * LANES))
        query = builder.add(queries, builder.mul(loop.index, constant(I64, _UNROLL * width * 4)))
        prefetch(builder, builder.add(next_keys, row))
        for step in range(_UNROLL):
            codes = _load_codes(builder, emit.offset(builder, builder.add(keys, row), step * LANES))
            accumulate(builder, sums, emit.offset(builder, query, step * width * 4), 4, codes)
    scales = emit.load(builder, builder.add(keys, builder.mul(head_dim, constant(I64, LANES))), V16F)
    for i, place in enumerate(sums):
        score = builder.fmul(builder.load(place), scales)
        emit.store(builder, score, emit.offset(builder, scores, i * SCORE_STRIDE * 4), 64)


@operation(types.void, *[types.int64] * 6, num_literals=1)
def mix_tile8(
    builder: Any, weights: Any, values: Any, scales: Any, sums: Any, num_positions: Any, next_values: Any, width: int
) -> None:
    """sums[i][0..15] += sum over positions p of (weights[i][p] * scales[p]) * codes[p][0..15], p ascending, below num_positions."""
    places = accumulators(builder, width)
    for i, place in enumerate(places):
        builder.store(emit.load(builder, emit.offset(builder, sums, i * _VECTOR_BYTES), V16F, 64), place)
    for line in range(LANES * LANES // _VECTOR_BYTES):
        prefetch(builder, emit.offset(builder, next_values, line * _VECTOR_BYTES))
    with cgutils.for_range(builder, num_positions, intp=I64) as loop:
        codes = _load_codes(builder, builder.add(values, builder.mul(loop.index, constant(I64, LANES))))
        at = builder.mul(loop.index, constant(I64, 4))
        scale = emit.load(builder, builder.add(scales, at), F32)
        for i, place in enumerate(places):
            weight = emit.load(builder, emit.offset(builder, builder.add(weights, at), i * SCORE_STRIDE * 4), F32)
            factor = emit.splat(builder, builder.fmul(weight, scale))
            builder.store(emit.fma(builder, factor, codes, builder.load(place)), place)
    for i, place in enumerate(places):
        emit.store(builder, builder.load(place), emit.offset(builder, sums, i * _VECTOR_BYTES), 64)


@operation(types.void, types.int64, types.float32)
def set_code(builder: Any, address: Any, value: Any) -> None:
    """Store a float32 in -127 .. 127, rounded half to even, as int8."""
    magic = constant(F32, 12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, on every machine
    rounded = builder.fsub(builder.fadd(value, magic), magic)
    emit.store(builder, builder.fptosi(rounded, ir.IntType(8)), address, 1)
