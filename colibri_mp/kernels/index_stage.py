"""The indexer's phases inside a compiled stage: which positions each row's attention reads.

Before them the stage prepares, for each row, its normed input (`prepare_input_row`) and the numbers its queries are made from
(`prepare_query_row`). Numbered from the phase that the stage gives:

    +0  project   blocks of key rows; of query and head weight rows if any row sees more than top_k positions
    +1  turn      rows (`index_rows`): layer norm, rotary embedding; keys go to the cache
    +2  score     groups of rows: scores of all positions, and the choice. If rows are few: splits of rows, scores only
    +3  choose    only if the splits of rows were shared among threads: rows

A *sparse* row is one whose position is top_k or above; the others see all positions and have no choice to make. Its scores depend on its
position, its sequence's keys and the weights alone: each position's is one chain of operations (`index_tiles`).

Formula: transformers' `GlmMoeDsaIndexer` without its constant positive factors, which change no choice.
"""

from typing import Any

import numpy as np

from colibri_mp.kernels.index_rows import finish_key, finish_queries, pack_heads, tile_address
from colibri_mp.kernels.index_select import select_largest
from colibri_mp.kernels.index_tiles import index_tile
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.linear import MATRIX
from colibri_mp.kernels.stage_parts import (
    TOKENS_A_CHUNK,
    multiply_chunk,
    num_block_chunks,
    num_token_chunks,
    prepare_row,
)
from colibri_mp.kernels.team import barrier, done, take
from colibri_mp.kernels.vectors import get_i32

STEP_FIELDS = (
    *("num_tokens", "positions", "sequences", "block_table", "max_blocks"),
    *("num_sparse", "sparse_rows", "num_splits", "shares", "chosen", "keys", "tile_bytes"),
)
"""Fields that change from call to call, int64; they come first in FRAME. num_tokens 0: the layer has no indexer.

sparse_rows: int32 [num_sparse]; shares: 1 if the splits of rows are shared among threads; chosen: int32 [num_tokens, top_k], written
for sparse rows, ascending; keys: address of those of block 0 in the layer; tile_bytes: from one block to the next.
"""

_SHAPE_FIELDS = ("num_heads", "num_groups", "head_dim", "top_k", "rotary_half", "interleaved")
_ADDRESS_FIELDS = (
    *("k_norm", "k_bias", "cos", "sin", "shared_scores"),
    *("q", "k", "g", "q_stride", "k_stride", "g_stride", "q_rows", "k_rows", "g_rows"),
    *("q_prepared", "k_prepared", "g_prepared", "q_xs", "k_xs", "g_xs"),
)
_SCRATCH_FIELDS = ("queries_bytes", "scores_bytes", "scores_offset", "histogram_offset")
FRAME = np.dtype(
    [
        *[(name, np.int64) for name in STEP_FIELDS],
        *[(f"{name}_matrix", MATRIX) for name in "qkg"],
        *[(name, np.int64) for name in (*_SHAPE_FIELDS, *_ADDRESS_FIELDS, *_SCRATCH_FIELDS)],
        ("eps", np.float64),
    ]
)
"""g: the weights of the heads. `*_rows` and `*_xs`: see `linear`."""

ROWS_A_CHUNK = 4
SPLIT_TILES = 64
NUM_PHASES = 4


@compiled
def prepare_input_row(job: Any, row: int, t: int) -> None:
    """Prepare a token's normed input, float32 at address `row`, if the layer has an indexer."""
    if job.num_tokens > 0:
        prepare_row(job.k_matrix, row, job.k_prepared, t)
        if job.g_prepared != job.k_prepared:
            prepare_row(job.g_matrix, row, job.g_prepared, t)


@compiled
def prepare_query_row(job: Any, row: int, t: int) -> None:
    """Prepare the numbers that a token's queries are made from, if there are any to be made."""
    if job.num_sparse > 0:
        prepare_row(job.q_matrix, row, job.q_prepared, t)


@compiled
def index_phases(job: Any, control: int, tag: int, first_phase: int, scratch: int) -> bool:
    """All of them; scratch: the thread's own, or 0: it takes no chunk that needs any. False: the job is over, leave."""
    if not _project_phase(job, control, tag, first_phase):
        return False
    if not _turn_phase(job, control, tag, first_phase + 1):
        return False
    if not _score_phase(job, control, tag, first_phase + 2, scratch):
        return False
    return _choose_phase(job, control, tag, first_phase + 3, scratch)


@compiled
def _project_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    k_chunks = num_block_chunks(job.k_matrix) if job.num_tokens > 0 else 0
    q_chunks = num_block_chunks(job.q_matrix) if job.num_sparse > 0 else 0
    num_chunks = k_chunks + q_chunks + (num_block_chunks(job.g_matrix) if job.num_sparse > 0 else 0)
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        if chunk < q_chunks:
            multiply_chunk(job.q_matrix, chunk, job.q_xs, job.q_rows, job.num_tokens)
        elif chunk < q_chunks + k_chunks:
            multiply_chunk(job.k_matrix, chunk - q_chunks, job.k_xs, job.k_rows, job.num_tokens)
        else:
            multiply_chunk(job.g_matrix, chunk - q_chunks - k_chunks, job.g_xs, job.g_rows, job.num_tokens)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def _turn_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            position = get_i32(job.positions + 4 * t)
            finish_key(job, t, position)
            if position >= job.top_k:
                finish_queries(job, t, position)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def _score_phase(job: Any, control: int, tag: int, phase: int, scratch: int) -> bool:
    num_groups = (job.num_sparse + ROWS_A_CHUNK - 1) // ROWS_A_CHUNK
    num_chunks = job.num_sparse * job.num_splits if job.shares != 0 else num_groups
    chunk = take(control, tag, phase, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        if job.shares != 0:
            row = chunk // job.num_splits
            pack_heads(job, _sparse_row(job, row), scratch)
            _score_split(job, _sparse_row(job, row), chunk % job.num_splits, scratch, _shared_scores(job, row))
        else:
            _score_and_choose(job, chunk * ROWS_A_CHUNK, min(job.num_sparse, (chunk + 1) * ROWS_A_CHUNK), scratch)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def _choose_phase(job: Any, control: int, tag: int, phase: int, scratch: int) -> bool:
    num_chunks = job.num_sparse if job.shares != 0 else 0
    chunk = take(control, tag, phase, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        _choose(job, _sparse_row(job, chunk), _shared_scores(job, chunk), scratch)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def _sparse_row(job: Any, i: int) -> int:
    return int(get_i32(job.sparse_rows + 4 * i))


@compiled
def _shared_scores(job: Any, i: int) -> int:
    return int(job.shared_scores + i * job.scores_bytes)


@compiled
def _score_and_choose(job: Any, first: int, last: int, scratch: int) -> None:
    """All of some rows by one thread; they take turns, so that keys they have in common are read once."""
    num_splits = 0
    for i in range(first, last):
        pack_heads(job, _sparse_row(job, i), scratch + (i - first) * job.queries_bytes)
        position = get_i32(job.positions + 4 * _sparse_row(job, i))
        num_splits = max(num_splits, position // (16 * SPLIT_TILES) + 1)
    scores = scratch + job.scores_offset
    for split in range(num_splits):
        for i in range(first, last):
            packed = scratch + (i - first) * job.queries_bytes
            _score_split(job, _sparse_row(job, i), split, packed, scores + (i - first) * job.scores_bytes)
    for i in range(first, last):
        _choose(job, _sparse_row(job, i), scores + (i - first) * job.scores_bytes, scratch)


@compiled
def _score_split(job: Any, t: int, split: int, packed: int, scores: int) -> None:
    """Scores of a row for the positions of one split that it sees (up to the end of the last tile)."""
    sequence = get_i32(job.sequences + 4 * t)
    first = split * SPLIT_TILES
    end = min(first + SPLIT_TILES, get_i32(job.positions + 4 * t) // 16 + 1)
    weights = job.g + t * job.g_stride
    for tile in range(first, end):
        keys = tile_address(job, sequence, tile)
        following = tile_address(job, sequence, min(tile + 1, end - 1))
        index_tile(packed, weights, keys, scores + tile * 64, job.num_groups, job.head_dim, following)


@compiled
def _choose(job: Any, t: int, scores: int, scratch: int) -> None:
    num_scores = get_i32(job.positions + 4 * t) + 1
    select_largest(scores, num_scores, job.top_k, job.chosen + t * job.top_k * 4, scratch + job.histogram_offset)
