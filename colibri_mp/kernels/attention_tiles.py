"""The two inner loops of attention: scores of 16 positions, and the weighted sum of 16 values, for a few queries at once.

A *group* of W query vectors shares each load of keys or values. W is one of WIDTHS; the largest fills the registers of the
instruction set. It changes no result: every lane of every query has its own chain of operations, in ascending order. Layouts:

    queries  [head_dim][W]                  packed, so that the next query is 4 bytes away
    keys     [head_dim][16 positions]       a tile of the cache, see `kv_cache`
    scores   [W][SCORE_STRIDE]              of which a tile is 16 consecutive floats in each row
    values   [16 positions][16 elements]    one part of a head's tile
    sums     [W][16 elements]

Both prefetch the tile that comes next into the second-level cache: the tiles of a sequence are scattered, and the processor
does not guess across pages (measured on Zen 4: 9 GB/s without, 21 with, into the first-level cache 10).
For caches of 8 bits: `attention_tiles8`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I8, I32, I64, LANES, V16F, constant
from colibri_mp.kernels.jit import operation

WIDTHS = (1, 4, 8) if emit.ISA == "avx512_vnni" else (1, 4)
"""Queries of a group: the smallest that takes all of a chunk, or the largest, and several groups."""

SPLIT_TOKENS = 512
"""Positions that are scored, exponentiated and summed at a time: part of the order of operations, so never changed at run time."""

SCORE_STRIDE = SPLIT_TOKENS + LANES
"""Floats from one query's scores to the next one's; not a power of two, whose rows would fall into the same cache sets."""

_VECTOR_BYTES = 4 * LANES
_UNROLL = 2  # head_dim is even


def prefetch(builder: Any, address: Any) -> None:
    """Read the cache line at `address` into the second-level cache."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    read_data_into_level_2 = [constant(I32, value) for value in (0, 2, 1)]
    emit.call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *read_data_into_level_2])


def accumulators(builder: Any, width: int) -> list[Any]:
    """Stack places that LLVM turns into registers."""
    return [cgutils.alloca_once(builder, V16F) for _ in range(width)]


def accumulate(builder: Any, sums: list[Any], scalars: Any, stride: int, common: Any) -> None:
    """sums[i] += (float at scalars + i * stride) * common, for each query i."""
    for i, place in enumerate(sums):
        factor = emit.splat(builder, emit.load(builder, emit.offset(builder, scalars, i * stride), F32))
        builder.store(emit.fma(builder, factor, common, builder.load(place)), place)


@operation(types.void, *[types.int64] * 5, num_literals=1)
def score_tile(builder: Any, queries: Any, keys: Any, scores: Any, head_dim: Any, next_keys: Any, width: int) -> None:
    """scores[i][0..15] = sum over d of queries[d][i] * keys[d][0..15], d ascending; prefetches head_dim vectors at `next_keys`."""
    sums = accumulators(builder, width)
    for place in sums:
        builder.store(constant(V16F, 0.0), place)
    with cgutils.for_range(builder, builder.sdiv(head_dim, constant(I64, _UNROLL)), intp=I64) as loop:
        row = builder.mul(loop.index, constant(I64, _UNROLL * _VECTOR_BYTES))
        query = builder.add(queries, builder.mul(loop.index, constant(I64, _UNROLL * width * 4)))
        for step in range(_UNROLL):
            here = emit.offset(builder, row, step * _VECTOR_BYTES)
            key = emit.load(builder, builder.add(keys, here), V16F, 64)
            prefetch(builder, builder.add(next_keys, here))
            accumulate(builder, sums, emit.offset(builder, query, step * width * 4), 4, key)
    for i, place in enumerate(sums):
        emit.store(builder, builder.load(place), emit.offset(builder, scores, i * SCORE_STRIDE * 4), 64)


@operation(types.void, *[types.int64] * 5, num_literals=1)
def mix_tile(
    builder: Any, weights: Any, values: Any, sums: Any, num_positions: Any, next_values: Any, width: int
) -> None:
    """sums[i][0..15] += sum over positions p of weights[i][p] * values[p][0..15], p ascending, below num_positions (1..16).

    `weights` are scores that were exponentiated, with the same strides. Prefetches 16 vectors at `next_values`.
    """
    places = accumulators(builder, width)
    for i, place in enumerate(places):
        builder.store(emit.load(builder, emit.offset(builder, sums, i * _VECTOR_BYTES), V16F, 64), place)

    def add(weight: Any, here: Any) -> None:
        value = emit.load(builder, builder.add(values, here), V16F, 64)
        accumulate(builder, places, weight, SCORE_STRIDE * 4, value)

    with builder.if_else(builder.icmp_signed("==", num_positions, constant(I64, LANES))) as (full, partial):
        with full:
            for p in range(LANES):
                here = constant(I64, p * _VECTOR_BYTES)
                prefetch(builder, builder.add(next_values, here))
                add(emit.offset(builder, weights, 4 * p), here)
        with partial, cgutils.for_range(builder, num_positions, intp=I64) as loop:
            weight = builder.add(weights, builder.mul(loop.index, constant(I64, 4)))
            add(weight, builder.mul(loop.index, constant(I64, _VECTOR_BYTES)))
    for i, place in enumerate(places):
        emit.store(builder, builder.load(place), emit.offset(builder, sums, i * _VECTOR_BYTES), 64)
