"""Softmax attention of a few heads over the latents of their sequence, in compiled code.

A *chunk* is up to `job.max_queries` query vectors: rows of one sequence with consecutive positions, times `job.group_size` heads. All
heads read the same latents, so a chunk may hold any of them. A query is its head's latent query and rope query end to end: its scores
are products with the rows of the cache, its sums are sums of latents. Splits, partials and their merging are those of `attention_core`.

**Which positions a row reads** is decided by two functions alone, `num_read` and `position_at`: all up to its own, or, where
`job.chosen` is not 0, a list for each row:

    chosen       int32 [num_tokens][chosen_stride]   positions in ascending order, each at most the row's own
    num_chosen   int32 [num_tokens]                   how many of them

A list of all positions gives the bits of no list. With lists a place is one row (`MlaStage` sees to it).
"""

from typing import Any

import numpy as np

from colibri_mp.kernels.attention_core import TILE_TOKENS, clear_sums, exponentiate, first_sum, hide
from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, SPLIT_TOKENS
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.mla_tiles import (
    PART_BYTES,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
    load_codes16,
    mix_parts,
    score_tiles,
    turn_part,
)
from colibri_mp.kernels.vectors import get_f32, get_i32, lanes16, load16, select_less16, set_f32, splat16, store16

_TILES_A_SPLIT = SPLIT_TOKENS // TILE_TOKENS
_NOTHING = np.float32(0.0)


@compiled
def num_read(job: Any, row: int, position: int) -> int:
    """How many positions a row reads, the row's own position being `position`."""
    if job.chosen == 0:
        return position + 1
    return int(get_i32(job.num_chosen + 4 * row))


@compiled
def position_at(job: Any, row: int, idx: int) -> int:
    """The idx-th position that a row reads."""
    if job.chosen == 0:
        return idx
    return int(get_i32(job.chosen + row * job.chosen_stride + 4 * idx))


@compiled
def num_splits_of(job: Any, place: Any) -> int:
    """Splits of a chunk: its last row reads most."""
    last = place.num_rows - 1
    return (num_read(job, place.row + last, place.position + last) + SPLIT_TOKENS - 1) // SPLIT_TOKENS


@compiled
def pack_queries(job: Any, place: Any, first_head: int, packed: int) -> None:
    """Copy the chunk's queries to groups [key_width][WIDTH]; zeros where the last group is not full, and beyond the rope query."""
    for query in range(place.num_groups * WIDTH):
        target = packed + (query // WIDTH * job.key_width * WIDTH + query % WIDTH) * 4
        row, head = place.row + query // job.group_size, first_head + query % job.group_size
        latent = job.latents + row * job.latents_stride + head * job.latent_dim * 4
        rope = job.q + row * job.q_stride + (head * (job.nope_dim + job.rope_dim) + job.nope_dim) * 4
        is_query = query < place.num_queries
        for i in range(job.latent_dim):
            set_f32(target + i * WIDTH * 4, get_f32(latent + 4 * i) if is_query else _NOTHING)
        for i in range(job.rope_dim):
            set_f32(target + (job.latent_dim + i) * WIDTH * 4, get_f32(rope + 4 * i) if is_query else _NOTHING)
        for i in range(job.latent_dim + job.rope_dim, job.key_width):
            set_f32(target + i * WIDTH * 4, _NOTHING)


@compiled
def attend_split(job: Any, place: Any, split: int, scratch: int, partial: int) -> None:
    """The partial of one chunk over one split; the chunk's queries are packed in the scratch."""
    last = place.num_rows - 1
    count = num_read(job, place.row + last, place.position + last)
    first_tile = split * _TILES_A_SPLIT
    end_tile = min(first_tile + _TILES_A_SPLIT, (count + TILE_TOKENS - 1) // TILE_TOKENS)
    scores = scratch + job.scores_offset
    for tile in range(first_tile, end_tile, VECTORS):
        _score(job, place, tile, end_tile, scratch, scores + (tile - first_tile) * VECTOR_BYTES)
    for query in range(place.num_queries):
        largest = partial + job.largest_offset + 4 * query
        exponentiate(scores + query * SCORE_STRIDE * 4, end_tile - first_tile, largest, job.max_queries)
    clear_sums(place.num_groups * job.value_parts * WIDTH, partial)
    for tile in range(first_tile, end_tile):
        _mix(job, place, tile, end_tile, count, scratch, scores + (tile - first_tile) * VECTOR_BYTES, partial)


@compiled
def _score(job: Any, place: Any, tile: int, end_tile: int, scratch: int, scores: int) -> None:
    """Scores of VECTORS tiles for all queries, hidden ones marked. Those of a tile beyond the last are never read."""
    keys, parts = scratch + job.keys_offset, job.key_width // 16
    for n in range(min(VECTORS, end_tile - tile)):
        rows = _rows_of(job, place, tile + n, scratch + job.rows_offset)
        for part in range(parts):
            turn_part(rows + part * PART_BYTES, keys + (part * 16 * VECTORS + n) * VECTOR_BYTES)
    for group in range(place.num_groups):
        queries = scratch + group * job.key_width * WIDTH * 4
        later = _source_of(job, place, min(tile + VECTORS + group % VECTORS, end_tile - 1), keys)
        score_tiles(queries, keys, scores + group * WIDTH * SCORE_STRIDE * 4, job.key_width, later)
    for query in range(place.num_queries):
        row = query // job.group_size
        end = num_read(job, place.row + row, place.position + row)
        for n in range(min(VECTORS, end_tile - tile)):
            start = (tile + n) * TILE_TOKENS
            if end < start + TILE_TOKENS:
                hide(scores + query * SCORE_STRIDE * 4 + n * VECTOR_BYTES, 0, end - 1 - start)


@compiled
def _mix(job: Any, place: Any, tile: int, end_tile: int, count: int, scratch: int, weights: int, partial: int) -> None:
    """Add the weighted latents of one tile to the sums of all queries."""
    rows = _rows_of(job, place, tile, scratch + job.rows_offset)
    num_positions = min(TILE_TOKENS, count - tile * TILE_TOKENS)
    later = _source_of(job, place, min(tile + 1, end_tile - 1), rows)
    for part in range(0, job.value_parts, VECTORS):
        for group in range(place.num_groups):
            sums = partial + (group * job.value_parts + part) * WIDTH * VECTOR_BYTES
            group_weights, here = weights + group * WIDTH * SCORE_STRIDE * 4, part * PART_BYTES
            mix_parts(group_weights, rows + here, sums, num_positions, later + here)


@compiled
def _tile_address(job: Any, place: Any, tile: int) -> int:
    block = get_i32(job.block_table + (place.sequence * job.max_blocks + tile) * 4)
    return int(job.kv_layer + block * job.tile_bytes)


@compiled
def _source_of(job: Any, place: Any, tile: int, otherwise: int) -> int:
    """Where a tile's rows will be read from, to be prefetched; `otherwise` where they lie here and there."""
    return _tile_address(job, place, tile) if job.chosen == 0 and job.kv_bits == 32 else otherwise


@compiled
def _rows_of(job: Any, place: Any, tile: int, buffer: int) -> int:
    """Address of rows [P / 16][16 positions][16 elements] of the 16 positions that come at 16 * tile in what a place reads.

    In the cache itself where they lie there so, else copied to `buffer`, whose other positions keep what they had.
    """
    if job.chosen == 0 and job.kv_bits == 32:
        return _tile_address(job, place, tile)
    last = place.num_rows - 1
    count = num_read(job, place.row + last, place.position + last)
    for lane in range(min(TILE_TOKENS, count - tile * TILE_TOKENS)):
        position = position_at(job, place.row, tile * TILE_TOKENS + lane)
        _copy_position(job, _tile_address(job, place, position // TILE_TOKENS), position % TILE_TOKENS, buffer, lane)
    return buffer


@compiled
def _copy_position(job: Any, tile: int, source: int, buffer: int, lane: int) -> None:
    """Position `source` of a tile of the cache becomes position `lane` of the buffer, as float32."""
    parts = job.key_width // 16
    if job.kv_bits == 32:
        for part in range(parts):
            value = load16(tile + part * PART_BYTES + source * VECTOR_BYTES)
            store16(buffer + part * PART_BYTES + lane * VECTOR_BYTES, value)
        return
    scales = tile + job.key_width * 16 + 4 * source
    latent_scale, key_scale = splat16(get_f32(scales)), splat16(get_f32(scales + 64))
    for part in range(parts):
        is_latent = splat16(np.float32(job.latent_dim - part * 16))
        scale = select_less16(lanes16(), is_latent, latent_scale, key_scale)
        codes = load_codes16(tile + (part * 16 + source) * 16)
        store16(buffer + part * PART_BYTES + lane * VECTOR_BYTES, codes * scale)


@compiled
def write_latents(job: Any, place: Any, first_head: int, merged: int) -> None:
    """The queries' latents are overwritten by what attention gives: sums / total."""
    for query in range(place.num_queries):
        row, head = place.row + query // job.group_size, first_head + query % job.group_size
        target = job.latents + row * job.latents_stride + head * job.latent_dim * 4
        inverse = np.float32(1.0) / get_f32(merged + job.largest_offset + 4 * (job.max_queries + query))
        sums = merged + first_sum(job, place, query)
        for i in range(0, job.latent_dim, 16):
            store16(target + 4 * i, load16(sums + i // 16 * WIDTH * VECTOR_BYTES) * splat16(inverse))
