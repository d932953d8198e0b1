"""Softmax attention of a few queries over the cached positions of their sequence, in compiled code.

A *chunk* is up to `job.max_queries` query vectors that read the same key-value head: rows of one sequence with consecutive
positions, times the query heads of the group. Positions are taken in *splits* of SPLIT_TOKENS; a split gives a *partial*:

    sums     [groups][P / 16][width][16 elements]    sum of exp(score - largest) * value
    largest  [queries]                                 largest score of the split
    total    [queries]                                 sum of exp(score - largest)

and partials are merged in ascending order of their positions (arXiv 2205.14135, section 3.1), whether one thread does all
splits of a chunk or several do. So the operations for one query and head depend on its position and its keys alone. Positions
that are hidden from a query have weight zero, which changes no sum.

`job` is the record of `attention.FRAME`; `place` one of `PLACES` (where a chunk's queries are).
"""

from typing import Any

import numpy as np

from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, SPLIT_TOKENS, WIDTHS, mix_tile, score_tile
from colibri_mp.kernels.attention_tiles8 import mix_tile8, score_tile8
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.norm import store_up_to16
from colibri_mp.kernels.vectors import (
    exp16,
    fma16,
    get_f32,
    get_i32,
    lanes16,
    largest16,
    load16,
    max16,
    select_less16,
    set_f32,
    splat16,
    store16,
    sum16,
)

HIDDEN = np.float32(-1e30)
"""Score of a position that is not visible; finite, so that differences of scores are."""

TILE_TOKENS = 16
LARGEST_WIDTH = WIDTHS[-1]
_VECTOR_BYTES = 64
_NOTHING = np.float32(0.0)
_ONE = np.float32(1.0)
_HALF_HIDDEN = np.float32(-5e29)


@compiled
def attend_split(job: Any, place: Any, kv_head: int, split: int, scratch: int, partial: int) -> None:
    """The partial of one chunk over one split; the chunk's queries are packed in the scratch."""
    first, last = visible_range(job, place)
    first_tile = max(split * SPLIT_TOKENS, first) // TILE_TOKENS
    end_tile = min(split * SPLIT_TOKENS + SPLIT_TOKENS - 1, last) // TILE_TOKENS + 1
    scores = scratch + job.scores_offset
    for tile in range(first_tile, end_tile):
        _score(job, place, kv_head, tile, end_tile, first_tile, scratch)
    for query in range(place.num_queries):
        exponentiate(
            scores + query * SCORE_STRIDE * 4,
            end_tile - first_tile,
            partial + job.largest_offset + 4 * query,
            job.max_queries,
        )
    clear_sums(place.num_groups * job.value_parts * place.width, partial)
    for tile in range(first_tile, end_tile):
        _mix(job, place, kv_head, tile, first_tile, scores, partial)


@compiled
def group_width(num_queries: int) -> int:
    """Width of the groups for a chunk: see `WIDTHS`."""
    if num_queries == 1:
        return 1
    return 4 if num_queries <= 4 else LARGEST_WIDTH


@compiled
def visible_range(job: Any, place: Any) -> tuple[int, int]:
    """First and last position that any query of the chunk sees."""
    return max(0, place.position - job.window + 1), place.position + place.num_rows - 1


@compiled
def tile_address(job: Any, place: Any, kv_head: int, tile: int) -> int:
    """Address of the keys of 16 positions; their values follow `job.values_offset` bytes later."""
    block = get_i32(job.block_table + (place.sequence * job.max_blocks + tile) * 4)
    return int(job.kv_layer + (block * job.num_kv_heads + kv_head) * job.tile_bytes)


@compiled
def pack_queries(job: Any, place: Any, kv_head: int, packed: int) -> None:
    """Copy the chunk's queries to groups [head_dim][width]; zeros where the last group is not full."""
    width = place.width
    for query in range(place.num_groups * width):
        target = packed + (query // width * job.head_dim * width + query % width) * 4
        row, head = place.row + query // job.group_size, kv_head * job.group_size + query % job.group_size
        source = job.q + row * job.q_stride + head * job.head_dim * 4
        for d in range(job.head_dim):
            value = get_f32(source + 4 * d) if query < place.num_queries else _NOTHING
            set_f32(target + d * width * 4, value)


@compiled
def _score(job: Any, place: Any, kv_head: int, tile: int, end_tile: int, first_tile: int, scratch: int) -> None:
    """Scores of one tile for all groups, hidden ones marked."""
    keys = tile_address(job, place, kv_head, tile)
    if tile + 1 < end_tile:
        next_keys = tile_address(job, place, kv_head, tile + 1)
    else:
        next_keys = tile_address(job, place, kv_head, first_tile) + job.values_offset
    scores = scratch + job.scores_offset + (tile - first_tile) * _VECTOR_BYTES
    for group in range(place.num_groups):
        queries = scratch + group * job.head_dim * place.width * 4
        group_scores = scores + group * place.width * SCORE_STRIDE * 4
        if job.kv_bits == 8:
            _score_group8(place.width, queries, keys, group_scores, job.head_dim, next_keys)
        else:
            _score_group(place.width, queries, keys, group_scores, job.head_dim, next_keys)
    start = tile * TILE_TOKENS
    if start + TILE_TOKENS - 1 > place.position or start <= place.position + place.num_rows - 1 - job.window:
        for query in range(place.num_queries):
            position = place.position + query // job.group_size
            hide(scores + query * SCORE_STRIDE * 4, position - job.window + 1 - start, position - start)


@compiled
def _score_group(width: int, queries: int, keys: int, scores: int, head_dim: int, next_keys: int) -> None:
    if width == 1:
        score_tile(queries, keys, scores, head_dim, next_keys, 1)
    elif width == 4:
        score_tile(queries, keys, scores, head_dim, next_keys, 4)
    elif LARGEST_WIDTH > 4:
        score_tile(queries, keys, scores, head_dim, next_keys, LARGEST_WIDTH)


@compiled
def _score_group8(width: int, queries: int, keys: int, scores: int, head_dim: int, next_keys: int) -> None:
    if width == 1:
        score_tile8(queries, keys, scores, head_dim, next_keys, 1)
    elif width == 4:
        score_tile8(queries, keys, scores, head_dim, next_keys, 4)
    elif LARGEST_WIDTH > 4:
        score_tile8(queries, keys, scores, head_dim, next_keys, LARGEST_WIDTH)


@compiled
def hide(scores: int, first: int, last: int) -> None:
    """Of 16 scores keep the lanes first..last."""
    lane = lanes16()
    hidden = splat16(HIDDEN)
    kept = select_less16(lane, splat16(np.float32(last + 1)), load16(scores), hidden)
    store16(scores, select_less16(lane, splat16(np.float32(first)), hidden, kept))


@compiled
def exponentiate(scores: int, num_tiles: int, largest_place: int, max_queries: int) -> None:
    """exp(score - largest) in place, exactly zero where hidden; the largest and the sum go to the partial."""
    largest = splat16(HIDDEN)
    for tile in range(num_tiles):
        largest = max16(largest, load16(scores + tile * _VECTOR_BYTES))
    top = largest16(largest)
    largest = splat16(top)
    total = splat16(_NOTHING)
    for tile in range(num_tiles):
        score = load16(scores + tile * _VECTOR_BYTES)
        weight = select_less16(splat16(_HALF_HIDDEN), score, exp16(score - largest), splat16(_NOTHING))
        store16(scores + tile * _VECTOR_BYTES, weight)
        total = total + weight
    set_f32(largest_place, top)
    set_f32(largest_place + 4 * max_queries, sum16(total))


@compiled
def clear_sums(num_vectors: int, sums: int) -> None:
    for vector in range(num_vectors):
        store16(sums + vector * _VECTOR_BYTES, splat16(_NOTHING))


@compiled
def _mix(job: Any, place: Any, kv_head: int, tile: int, first_tile: int, scores: int, partial: int) -> None:
    """Add the weighted values of one tile to the sums of all groups."""
    last = place.position + place.num_rows - 1
    num_positions = min(TILE_TOKENS, last - tile * TILE_TOKENS + 1)
    following = tile + 1 if (tile + 1) * TILE_TOKENS <= last else tile
    values = tile_address(job, place, kv_head, tile) + job.values_offset
    next_values = tile_address(job, place, kv_head, following) + job.values_offset
    weights = scores + (tile - first_tile) * _VECTOR_BYTES
    for part in range(job.value_parts):
        here, following_here = values + part * job.part_bytes, next_values + part * job.part_bytes
        for group in range(place.num_groups):
            sums = partial + (group * job.value_parts + part) * place.width * _VECTOR_BYTES
            group_weights = weights + group * place.width * SCORE_STRIDE * 4
            if job.kv_bits == 8:
                scales = values + job.value_parts * job.part_bytes
                _mix_group8(place.width, group_weights, here, scales, sums, num_positions, following_here)
            else:
                _mix_group(place.width, group_weights, here, sums, num_positions, following_here)


@compiled
def _mix_group(width: int, weights: int, values: int, sums: int, num_positions: int, next_values: int) -> None:
    if width == 1:
        mix_tile(weights, values, sums, num_positions, next_values, 1)
    elif width == 4:
        mix_tile(weights, values, sums, num_positions, next_values, 4)
    elif LARGEST_WIDTH > 4:
        mix_tile(weights, values, sums, num_positions, next_values, LARGEST_WIDTH)


@compiled
def _mix_group8(
    width: int, weights: int, values: int, scales: int, sums: int, num_positions: int, next_values: int
) -> None:
    if width == 1:
        mix_tile8(weights, values, scales, sums, num_positions, next_values, 1)
    elif width == 4:
        mix_tile8(weights, values, scales, sums, num_positions, next_values, 4)
    elif LARGEST_WIDTH > 4:
        mix_tile8(weights, values, scales, sums, num_positions, next_values, LARGEST_WIDTH)


@compiled
def start_merge(job: Any, merged: int) -> None:
    """A partial of no positions."""
    clear_sums(job.max_queries * job.value_parts, merged)
    for query in range(0, job.max_queries, 16):
        store16(merged + job.largest_offset + 4 * query, splat16(HIDDEN))
        store16(merged + job.largest_offset + 4 * (job.max_queries + query), splat16(_NOTHING))


@compiled
def take_in_sinks(job: Any, place: Any, kv_head: int, merged: int) -> None:
    """Where heads have sinks, a partial of no positions becomes one of a position with the sink's score and the value zero."""
    if job.sinks != 0:
        for query in range(place.num_queries):
            head = kv_head * job.group_size + query % job.group_size
            set_f32(merged + job.largest_offset + 4 * query, get_f32(job.sinks + 4 * head))
            set_f32(merged + job.largest_offset + 4 * (job.max_queries + query), _ONE)


@compiled
def first_sum(job: Any, place: Any, query: int) -> int:
    """Offset of a query's first vector in the sums; the next ones are `place.width` vectors apart."""
    return int(query // place.width * job.value_parts * place.width + query % place.width) * _VECTOR_BYTES


@compiled
def merge_partial(job: Any, place: Any, partial: int, merged: int, factors: int) -> None:
    """Add the partial of the next split to `merged`; `factors` is scratch of 2 * max_queries floats."""
    _merge_totals(job, partial + job.largest_offset, merged + job.largest_offset, factors)
    for query in range(place.num_queries):
        keep = splat16(get_f32(factors + 4 * query))
        add = splat16(get_f32(factors + 4 * (job.max_queries + query)))
        first = first_sum(job, place, query)
        for part in range(job.value_parts):
            at = first + part * place.width * _VECTOR_BYTES
            store16(merged + at, fma16(load16(partial + at), add, load16(merged + at) * keep))


@compiled
def _merge_totals(job: Any, partial: int, merged: int, factors: int) -> None:
    """The new largest scores and totals; factors[query] scales the sums so far, factors[max_queries + query] the new ones."""
    totals = 4 * job.max_queries
    for query in range(0, job.max_queries, 16):
        at = 4 * query
        before, new = load16(merged + at), load16(partial + at)
        largest = max16(before, new)
        keep, add = exp16(before - largest), exp16(new - largest)
        store16(merged + at, largest)
        store16(merged + totals + at, fma16(load16(partial + totals + at), add, load16(merged + totals + at) * keep))
        store16(factors + at, keep)
        store16(factors + totals + at, add)


@compiled
def write_context(job: Any, place: Any, kv_head: int, merged: int) -> None:
    """context[row][head] = sums / total."""
    for query in range(place.num_queries):
        row, head = place.row + query // job.group_size, kv_head * job.group_size + query % job.group_size
        target = job.context + row * job.context_stride + head * job.head_dim * 4
        inverse = np.float32(1.0) / get_f32(merged + job.largest_offset + 4 * (job.max_queries + query))
        sums = merged + first_sum(job, place, query)
        for d in range(0, job.head_dim, 16):
            part = load16(sums + d // 16 * place.width * _VECTOR_BYTES)
            store_up_to16(target + 4 * d, part * splat16(inverse), job.head_dim - d)
