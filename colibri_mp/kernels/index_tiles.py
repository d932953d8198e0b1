"""The inner loop of the indexer: the scores of 16 positions for one row, all heads.

    queries  [heads / W][head_dim][W]       packed, so that the next head is 4 bytes away; heads padded to a multiple of W
    weights  [heads]                        zero where padded
    keys     [head_dim][16 positions]       of a block, see `index_keys`

score[p] = sum over heads h of weights[h] * max(0, sum over d of queries[h][d] * keys[d][p]), both sums in ascending order, whatever W is.
"""

from typing import Any

from numba import types
from numba.core import cgutils

from colibri_mp.kernels import emit
from colibri_mp.kernels.attention_tiles import accumulate, accumulators, prefetch
from colibri_mp.kernels.emit import I64, V16F, constant
from colibri_mp.kernels.jit import operation

WIDTH = 8 if emit.ISA == "avx512_vnni" else 4
"""Heads that share each load of keys."""

_VECTOR_BYTES = 64
_UNROLL = 2  # head_dim is even


@operation(types.void, *[types.int64] * 7)
def index_tile(
    builder: Any, queries: Any, weights: Any, keys: Any, scores: Any, num_groups: Any, head_dim: Any, next_keys: Any
) -> None:
    """scores[0..15], see the module; prefetches head_dim / num_groups vectors or more of the tile at `next_keys`."""
    total = cgutils.alloca_once(builder, V16F)
    builder.store(constant(V16F, 0.0), total)
    sums = accumulators(builder, WIDTH)
    with cgutils.for_range(builder, num_groups, intp=I64) as group:
        for place in sums:
            builder.store(constant(V16F, 0.0), place)
        first = builder.mul(group.index, builder.mul(head_dim, constant(I64, WIDTH * 4)))
        group_queries = builder.add(queries, first)
        with cgutils.for_range(builder, builder.sdiv(head_dim, constant(I64, _UNROLL)), intp=I64) as loop:
            row = builder.mul(loop.index, constant(I64, _UNROLL * _VECTOR_BYTES))
            query = builder.add(group_queries, builder.mul(loop.index, constant(I64, _UNROLL * WIDTH * 4)))
            for step in range(_UNROLL):
                key = emit.load(builder, builder.add(keys, emit.offset(builder, row, step * _VECTOR_BYTES)), V16F, 64)
                accumulate(builder, sums, emit.offset(builder, query, step * WIDTH * 4), 4, key)
        _prefetch_share(builder, group.index, num_groups, head_dim, next_keys)
        group_weights = builder.add(weights, builder.mul(group.index, constant(I64, WIDTH * 4)))
        for i, place in enumerate(sums):
            positive = emit.maximum(builder, builder.load(place), constant(V16F, 0.0))
            weight = emit.splat(builder, emit.load(builder, emit.offset(builder, group_weights, 4 * i), emit.F32))
            builder.store(emit.fma(builder, weight, positive, builder.load(total)), total)
    emit.store(builder, builder.fadd(builder.load(total), constant(V16F, 0.0)), scores, 64)  # -0 becomes 0


def _prefetch_share(builder: Any, group: Any, num_groups: Any, head_dim: Any, next_keys: Any) -> None:
    """Each group asks for its share of the next tile."""
    share = builder.sdiv(builder.add(head_dim, builder.sub(num_groups, constant(I64, 1))), num_groups)
    first = builder.add(next_keys, builder.mul(builder.mul(group, share), constant(I64, _VECTOR_BYTES)))
    with cgutils.for_range(builder, share, intp=I64) as loop:
        prefetch(builder, builder.add(first, builder.mul(loop.index, constant(I64, _VECTOR_BYTES))))
