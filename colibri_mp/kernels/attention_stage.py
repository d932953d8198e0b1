"""The compiled attention block: its frame, and the seven phases between which the team meets.

    0  norm         rows of x -> RMS norm -> prepared rows for q, k and v
    1  project      blocks of q, k and v rows -> queries, keys, values of all tokens
    2  turn         rows (`attention_rows`): biases, q/k norm, clip, rotary embedding, scale; keys and values go to the cache
    3  attend       chunks of queries over the cache (`attention_core`); the context takes the queries' place
    4  merge        only if phase 3 shared the splits of one chunk among threads: partials -> context
    5  prepare      rows of the context, times sigmoid(gate) if there is one -> prepared rows for o
    6  output       blocks of o rows; x += the product (+ bias)

Threads take scratch memory by a ticket: see `stage_parts`.
"""

from typing import Any

import numpy as np

from colibri_mp.kernels import attention_core as core
from colibri_mp.kernels.attention_plan import PLACE, PLACE_BYTES
from colibri_mp.kernels.attention_rows import add_row, clip_row, finish_projection, gate_row, store_in_cache
from colibri_mp.kernels.attention_tiles import SPLIT_TOKENS
from colibri_mp.kernels.block import block_frame, finish_block
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.linear import MATRIX, blocks_per_chunk, prepare_rows
from colibri_mp.kernels.norm import rms_norm_row
from colibri_mp.kernels.stage_parts import (
    TOKENS_A_CHUNK,
    multiply_chunk,
    num_block_chunks,
    num_token_chunks,
    partial_address,
    prepare_row,
    take_scratch,
)
from colibri_mp.kernels.team import barrier, done, take
from colibri_mp.kernels.vectors import (
    get_i32,
    record_at,
)

STEP_FIELDS = (
    *("num_tokens", "positions", "sequences", "block_table", "max_blocks"),
    *("num_places", "num_items", "num_splits", "num_shared"),
    *("kv_layer", "x"),
)
"""Fields that change from call to call, int64; they come first in FRAME.

num_items: chunks, places x key-value heads; num_splits: splits up to the batch's last position; num_shared: num_items if their
splits are shared among threads, else 0.
"""

_SHAPE_FIELDS = ("hidden", "num_heads", "num_kv_heads", "head_dim", "group_size", "qk_norm", "window", "rotary_half")
_VECTOR_FIELDS = ("norm_weight", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "cos", "sin", "sinks")
_ROW_FIELDS = (
    *("q", "k", "v", "out", "context"),
    *("q_stride", "k_stride", "out_stride", "context_stride", "gate_offset"),
    *("q_rows", "k_rows", "v_rows", "out_rows"),
    *("q_prepared", "k_prepared", "v_prepared", "o_prepared"),
    *("q_xs", "k_xs", "v_xs", "o_xs"),
)
"""`*_rows`: tables of output rows, `*_xs`: of prepared rows (see `linear`).

gate_offset: bytes from q to its gate in a row of q, 0 without."""
_CORE_FIELDS = (
    *("places", "kv_bits", "tile_bytes", "values_offset", "part_bytes", "value_parts", "max_queries", "largest_offset"),
    *("scores_offset", "partial_offset", "merged_offset", "factors_offset"),
    *("scratch", "scratch_bytes", "num_scratches", "partials", "partial_bytes"),
)

FRAME = np.dtype(
    [
        *[(name, np.int64) for name in STEP_FIELDS],
        *[(f"{name}_matrix", MATRIX) for name in "qkvo"],
        *[(name, np.int64) for name in (*_SHAPE_FIELDS, *_VECTOR_FIELDS, *_ROW_FIELDS, *_CORE_FIELDS)],
        *[(name, np.float64) for name in ("eps", "scale", "clip")],
    ]
)
"""What a call of the stage knows; 0 where an address is of something that is not there."""

NUM_PHASES = 7
_NORM, _PROJECT, _TURN, _ATTEND, _MERGE, _PREPARE, _OUTPUT, _FINISH = (fixed(phase) for phase in range(NUM_PHASES + 1))


@compiled
def _norm_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _NORM, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            rms_norm_row(job.x + t * job.hidden * 4, job.norm_weight, scratch, job.hidden, np.float32(job.eps))
            prepare_row(job.q_matrix, scratch, job.q_prepared, t)
            if job.k_prepared != job.q_prepared:
                prepare_row(job.k_matrix, scratch, job.k_prepared, t)
            if job.v_prepared not in (job.q_prepared, job.k_prepared):
                prepare_row(job.v_matrix, scratch, job.v_prepared, t)
        done(control, _NORM)
        chunk = take(control, tag, _NORM, num_chunks)
    return barrier(control, tag, _NORM, num_chunks)


@compiled
def _project_phase(job: Any, control: int, tag: int) -> bool:
    q_chunks, k_chunks = num_block_chunks(job.q_matrix), num_block_chunks(job.k_matrix)
    num_chunks = q_chunks + k_chunks + num_block_chunks(job.v_matrix)
    chunk = take(control, tag, _PROJECT, num_chunks)
    while chunk >= 0:
        if chunk < q_chunks:
            multiply_chunk(job.q_matrix, chunk, job.q_xs, job.q_rows, job.num_tokens)
        elif chunk < q_chunks + k_chunks:
            multiply_chunk(job.k_matrix, chunk - q_chunks, job.k_xs, job.k_rows, job.num_tokens)
        else:
            multiply_chunk(job.v_matrix, chunk - q_chunks - k_chunks, job.v_xs, job.v_rows, job.num_tokens)
        done(control, _PROJECT)
        chunk = take(control, tag, _PROJECT, num_chunks)
    return barrier(control, tag, _PROJECT, num_chunks)


@compiled
def _turn_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _TURN, num_chunks)
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            position = get_i32(job.positions + 4 * t)
            q, k, v = job.q + t * job.q_stride, job.k + t * job.k_stride, job.v + t * job.k_stride
            finish_projection(job, q, job.q_bias, job.q_norm, job.num_heads, position, np.float32(job.scale))
            finish_projection(job, k, job.k_bias, job.k_norm, job.num_kv_heads, position, np.float32(1.0))
            add_row(v, job.v_bias, job.num_kv_heads * job.head_dim)
            clip_row(v, job.num_kv_heads * job.head_dim, np.float32(job.clip))
            store_in_cache(job, t, position, k, v)
        done(control, _TURN)
        chunk = take(control, tag, _TURN, num_chunks)
    return barrier(control, tag, _TURN, num_chunks)


@compiled
def _place_of(job: Any, item: int) -> Any:
    """The rows of an item; the last rows, which see most, come first."""
    return record_at(job.places + (job.num_places - 1 - item // job.num_kv_heads) * PLACE_BYTES, PLACE)


@compiled
def _attend_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = job.num_shared * job.num_splits if job.num_shared > 0 else job.num_items
    chunk = take(control, tag, _ATTEND, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        if job.num_shared > 0:
            _attend_shared(job, chunk // job.num_splits, chunk % job.num_splits, scratch)
        else:
            _attend_alone(job, chunk, scratch)
        done(control, _ATTEND)
        chunk = take(control, tag, _ATTEND, num_chunks)
    return barrier(control, tag, _ATTEND, num_chunks)


@compiled
def _attend_alone(job: Any, item: int, scratch: int) -> None:
    """All splits of an item, merged as they come."""
    place, kv_head = _place_of(job, item), item % job.num_kv_heads
    partial, merged = scratch + job.partial_offset, scratch + job.merged_offset
    core.pack_queries(job, place, kv_head, scratch)
    core.start_merge(job, merged)
    core.take_in_sinks(job, place, kv_head, merged)
    first, last = core.visible_range(job, place)
    for split in range(first // SPLIT_TOKENS, last // SPLIT_TOKENS + 1):
        core.attend_split(job, place, kv_head, split, scratch, partial)
        core.merge_partial(job, place, partial, merged, scratch + job.factors_offset)
    core.write_context(job, place, kv_head, merged)


@compiled
def _attend_shared(job: Any, item: int, split: int, scratch: int) -> None:
    """One split of an item, for `_merge_phase`."""
    place, kv_head = _place_of(job, item), item % job.num_kv_heads
    first, last = core.visible_range(job, place)
    if first // SPLIT_TOKENS <= split <= last // SPLIT_TOKENS:
        core.pack_queries(job, place, kv_head, scratch)
        core.attend_split(job, place, kv_head, split, scratch, partial_address(job, item, split))


@compiled
def _merge_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    chunk = take(control, tag, _MERGE, job.num_shared) if scratch != 0 else -1
    while chunk >= 0:
        place, merged = _place_of(job, chunk), scratch + job.merged_offset
        core.start_merge(job, merged)
        core.take_in_sinks(job, place, chunk % job.num_kv_heads, merged)
        first, last = core.visible_range(job, place)
        for split in range(first // SPLIT_TOKENS, last // SPLIT_TOKENS + 1):
            core.merge_partial(job, place, partial_address(job, chunk, split), merged, scratch + job.factors_offset)
        core.write_context(job, place, chunk % job.num_kv_heads, merged)
        done(control, _MERGE)
        chunk = take(control, tag, _MERGE, job.num_shared)
    return barrier(control, tag, _MERGE, job.num_shared)


@compiled
def _prepare_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _PREPARE, num_chunks)
    while chunk >= 0:
        first, last = chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)
        if job.gate_offset > 0:
            for t in range(first, last):
                context = job.context + t * job.context_stride
                gate_row(context, context + job.gate_offset, job.num_heads * job.head_dim)
        prepare_rows(job.o_matrix, job.context, job.context_stride, job.o_prepared, first, last)
        done(control, _PREPARE)
        chunk = take(control, tag, _PREPARE, num_chunks)
    return barrier(control, tag, _PREPARE, num_chunks)


@compiled
def _output_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks, rows = num_block_chunks(job.o_matrix), blocks_per_chunk(job.o_matrix) * 16
    chunk = take(control, tag, _OUTPUT, num_chunks)
    while chunk >= 0:
        multiply_chunk(job.o_matrix, chunk, job.o_xs, job.out_rows, job.num_tokens)
        first, last = chunk * rows, min(job.hidden, (chunk + 1) * rows)
        for t in range(job.num_tokens):
            out = job.out + t * job.out_stride + first * 4
            if job.o_bias != 0:
                add_row(out, job.o_bias + first * 4, last - first)
            add_row(job.x + (t * job.hidden + first) * 4, out, last - first)
        done(control, _OUTPUT)
        chunk = take(control, tag, _OUTPUT, num_chunks)
    return barrier(control, tag, _OUTPUT, num_chunks)


@compiled
def attention_phases(job: Any, control: int, tag: int) -> bool:
    """All of it, `NUM_PHASES` phases. False: the job is over, leave."""
    scratch = take_scratch(job, control, tag)
    if not _norm_phase(job, control, tag, scratch):
        return False
    if not _project_phase(job, control, tag):
        return False
    if not _turn_phase(job, control, tag):
        return False
    if not _attend_phase(job, control, tag, scratch):
        return False
    if not _merge_phase(job, control, tag, scratch):
        return False
    return _prepare_phase(job, control, tag) and _output_phase(job, control, tag)


def _attention_stage(frame: int, control: int, tag: int) -> None:
    attention_phases(record_at(frame, FRAME), control, tag)


STAGE = Native(_attention_stage)

BLOCK_FRAME = block_frame(FRAME)


def _attention_block(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, BLOCK_FRAME)
    if attention_phases(job.mixer, control, tag):
        finish_block(job.router, job.time, control, tag, _FINISH)


BLOCK = Native(_attention_block)
