"""The compiled block of latent attention: its frame, and the phases between which the team meets.

    0  norm        rows of x -> RMS norm -> prepared rows for q_a (or q) and kv_a
    1  project     blocks of q_a (or q) and kv_a
    2  latent      rows: norm of the latent, rope key turned, both to the cache; norm of q_a's row -> prepared rows for q_b
    3  queries     blocks of q_b; none where there is no q_a
    4  absorb      heads: rope query turned, queries scaled; nope query * W_uk -> latent query
    5 - 8          in layers with an indexer (DSA): which positions the rows read (`index_stage`)
    9  attend      chunks of queries over the cache (`mla_core`); latents take the latent queries' place
    10 merge       only if phase 9 shared the splits of one chunk among threads
    11 values      heads: W_uv * latent -> context
    12 prepare     rows of the context -> prepared rows for o
    13 output      blocks of o rows; x += the product

W_uk and W_uv are the halves of kv_b (arXiv 2405.04434, section 2.1.2: what is absorbed is equal in exact arithmetic), see
`mla_weights`. Threads take scratch memory by a ticket (`stage_parts`).
"""

from typing import Any

import numpy as np

from colibri_mp.kernels import attention_core, index_stage
from colibri_mp.kernels import mla_core as core
from colibri_mp.kernels.attention_plan import PLACE, PLACE_BYTES
from colibri_mp.kernels.block import block_frame, finish_block
from colibri_mp.kernels.index_stage import index_phases, prepare_input_row, prepare_query_row
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.linear import MATRIX, prepare_rows
from colibri_mp.kernels.mla_heads import TOKENS_A_PASS, absorb, close_gaps, unfold
from colibri_mp.kernels.mla_rows import store_latent, turn
from colibri_mp.kernels.norm import rms_norm_row
from colibri_mp.kernels.stage_parts import (
    TOKENS_A_CHUNK,
    add_product_chunk,
    multiply_chunk,
    num_block_chunks,
    num_token_chunks,
    partial_address,
    prepare_row,
    take_scratch,
)
from colibri_mp.kernels.team import barrier, done, take
from colibri_mp.kernels.vectors import get_i32, record_at

STEP_FIELDS = (
    *("num_tokens", "positions", "sequences", "block_table", "max_blocks"),
    *("num_places", "num_items", "num_splits", "num_shared"),
    *("chosen", "num_chosen", "chosen_stride"),
    *("kv_layer", "tile_bytes", "x"),
)
"""Fields that change from call to call, int64; they come first in FRAME. See `attention_stage`; `chosen`: see `mla_core`."""

_SHAPE_FIELDS = (
    *("hidden", "num_heads", "group_size", "head_chunks", "q_lora", "latent_dim", "rope_dim", "nope_dim", "v_dim"),
    *("v_padded", "key_width", "rotary_half", "interleaved"),
)
_VECTOR_FIELDS = ("norm_weight", "q_a_norm", "kv_a_norm", "cos", "sin", "uk_scales", "uk_biases", "num_scales")
_ROW_FIELDS = (
    *("q_a", "kv_a", "q", "latents", "out"),
    *("q_a_stride", "kv_a_stride", "q_stride", "latents_stride", "out_stride"),
    *("q_a_rows", "kv_a_rows", "q_rows", "latents_rows", "out_rows"),
    *("q_a_prepared", "kv_a_prepared", "q_prepared", "o_prepared"),
    *("q_a_xs", "kv_a_xs", "q_xs", "o_xs"),
)
_CORE_FIELDS = (
    *("places", "kv_bits", "value_parts", "max_queries", "largest_offset"),
    *("scores_offset", "keys_offset", "rows_offset", "partial_offset", "merged_offset", "factors_offset"),
    *("table_offset", "row_offset"),
    *("scratch", "scratch_bytes", "num_scratches", "partials", "partial_bytes"),
)
MATRICES = ("q_a", "kv_a", "q", "uk", "uv", "o")

FRAME = np.dtype(
    [
        *[(name, np.int64) for name in STEP_FIELDS],
        *[(f"{name}_matrix", MATRIX) for name in MATRICES],
        *[(name, np.int64) for name in (*_SHAPE_FIELDS, *_VECTOR_FIELDS, *_ROW_FIELDS, *_CORE_FIELDS)],
        *[(name, np.float64) for name in ("eps", "lora_eps", "scale")],
        ("index", index_stage.FRAME),
    ]
)
"""What a call of the stage knows; 0 where an address is of something that is not there. `q_lora` 0: no q_a, `q_matrix` takes h."""


_NORM, _PROJECT, _LATENT, _QUERIES, _ABSORB, _INDEX = (fixed(phase) for phase in range(6))
_ATTEND, _MERGE, _VALUES, _PREPARE, _OUTPUT, _FINISH = (fixed(5 + index_stage.NUM_PHASES + phase) for phase in range(6))


@compiled
def _norm_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _NORM, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            rms_norm_row(job.x + t * job.hidden * 4, job.norm_weight, scratch, job.hidden, np.float32(job.eps))
            if job.q_lora > 0:
                prepare_row(job.q_a_matrix, scratch, job.q_a_prepared, t)
            else:
                prepare_row(job.q_matrix, scratch, job.q_prepared, t)
            if job.kv_a_prepared not in (job.q_a_prepared, job.q_prepared):
                prepare_row(job.kv_a_matrix, scratch, job.kv_a_prepared, t)
            prepare_input_row(job.index, scratch, t)
        done(control, _NORM)
        chunk = take(control, tag, _NORM, num_chunks)
    return barrier(control, tag, _NORM, num_chunks)


@compiled
def _project_phase(job: Any, control: int, tag: int) -> bool:
    first_chunks = num_block_chunks(job.q_a_matrix) if job.q_lora > 0 else num_block_chunks(job.q_matrix)
    num_chunks = first_chunks + num_block_chunks(job.kv_a_matrix)
    chunk = take(control, tag, _PROJECT, num_chunks)
    while chunk >= 0:
        if chunk >= first_chunks:
            multiply_chunk(job.kv_a_matrix, chunk - first_chunks, job.kv_a_xs, job.kv_a_rows, job.num_tokens)
        elif job.q_lora > 0:
            multiply_chunk(job.q_a_matrix, chunk, job.q_a_xs, job.q_a_rows, job.num_tokens)
        else:
            multiply_chunk(job.q_matrix, chunk, job.q_xs, job.q_rows, job.num_tokens)
        done(control, _PROJECT)
        chunk = take(control, tag, _PROJECT, num_chunks)
    return barrier(control, tag, _PROJECT, num_chunks)


@compiled
def _latent_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _LATENT, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            position, latent = get_i32(job.positions + 4 * t), job.kv_a + t * job.kv_a_stride
            rms_norm_row(latent, job.kv_a_norm, latent, job.latent_dim, np.float32(job.lora_eps))
            turn(job, latent + job.latent_dim * 4, position, scratch)
            store_latent(job, t, position, latent)
            if job.q_lora > 0:
                row = job.q_a + t * job.q_a_stride
                rms_norm_row(row, job.q_a_norm, row, job.q_lora, np.float32(job.lora_eps))
                prepare_row(job.q_matrix, row, job.q_prepared, t)
                prepare_query_row(job.index, row, t)
        done(control, _LATENT)
        chunk = take(control, tag, _LATENT, num_chunks)
    return barrier(control, tag, _LATENT, num_chunks)


@compiled
def _queries_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_block_chunks(job.q_matrix) if job.q_lora > 0 else 0
    chunk = take(control, tag, _QUERIES, num_chunks)
    while chunk >= 0:
        multiply_chunk(job.q_matrix, chunk, job.q_xs, job.q_rows, job.num_tokens)
        done(control, _QUERIES)
        chunk = take(control, tag, _QUERIES, num_chunks)
    return barrier(control, tag, _QUERIES, num_chunks)


@compiled
def _absorb_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    chunk = take(control, tag, _ABSORB, job.num_heads) if scratch != 0 else -1
    while chunk >= 0:
        for first in range(0, job.num_tokens, TOKENS_A_PASS):
            absorb(job, chunk, first, min(job.num_tokens, first + TOKENS_A_PASS), scratch)
        done(control, _ABSORB)
        chunk = take(control, tag, _ABSORB, job.num_heads)
    return barrier(control, tag, _ABSORB, job.num_heads)


@compiled
def _place_of(job: Any, item: int) -> Any:
    """The rows of an item; the last rows, which see most, come first."""
    return record_at(job.places + (job.num_places - 1 - item // job.head_chunks) * PLACE_BYTES, PLACE)


@compiled
def _first_head(job: Any, item: int) -> int:
    return int(item % job.head_chunks * job.group_size)


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
    place, partial, merged = _place_of(job, item), scratch + job.partial_offset, scratch + job.merged_offset
    core.pack_queries(job, place, _first_head(job, item), scratch)
    attention_core.start_merge(job, merged)
    for split in range(core.num_splits_of(job, place)):
        core.attend_split(job, place, split, scratch, partial)
        attention_core.merge_partial(job, place, partial, merged, scratch + job.factors_offset)
    core.write_latents(job, place, _first_head(job, item), merged)


@compiled
def _attend_shared(job: Any, item: int, split: int, scratch: int) -> None:
    """One split of an item, for `_merge_phase`."""
    place = _place_of(job, item)
    if split < core.num_splits_of(job, place):
        core.pack_queries(job, place, _first_head(job, item), scratch)
        core.attend_split(job, place, split, scratch, partial_address(job, item, split))


@compiled
def _merge_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    chunk = take(control, tag, _MERGE, job.num_shared) if scratch != 0 else -1
    while chunk >= 0:
        place, merged = _place_of(job, chunk), scratch + job.merged_offset
        attention_core.start_merge(job, merged)
        for split in range(core.num_splits_of(job, place)):
            attention_core.merge_partial(
                job, place, partial_address(job, chunk, split), merged, scratch + job.factors_offset
            )
        core.write_latents(job, place, _first_head(job, chunk), merged)
        done(control, _MERGE)
        chunk = take(control, tag, _MERGE, job.num_shared)
    return barrier(control, tag, _MERGE, job.num_shared)


@compiled
def _values_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    chunk = take(control, tag, _VALUES, job.num_heads) if scratch != 0 else -1
    while chunk >= 0:
        for first in range(0, job.num_tokens, TOKENS_A_PASS):
            unfold(job, chunk, first, min(job.num_tokens, first + TOKENS_A_PASS), scratch)
        done(control, _VALUES)
        chunk = take(control, tag, _VALUES, job.num_heads)
    return barrier(control, tag, _VALUES, job.num_heads)


@compiled
def _prepare_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _PREPARE, num_chunks)
    while chunk >= 0:
        first, last = chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)
        if job.v_padded != job.v_dim:
            for t in range(first, last):
                close_gaps(job, job.q + t * job.q_stride)
        prepare_rows(job.o_matrix, job.q, job.q_stride, job.o_prepared, first, last)
        done(control, _PREPARE)
        chunk = take(control, tag, _PREPARE, num_chunks)
    return barrier(control, tag, _PREPARE, num_chunks)


@compiled
def _output_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_block_chunks(job.o_matrix)
    chunk = take(control, tag, _OUTPUT, num_chunks)
    while chunk >= 0:
        add_product_chunk(job, job.o_matrix, chunk, job.o_xs)
        done(control, _OUTPUT)
        chunk = take(control, tag, _OUTPUT, num_chunks)
    return barrier(control, tag, _OUTPUT, num_chunks)


@compiled
def mla_phases(job: Any, control: int, tag: int) -> bool:
    """All of it. False: the job is over, leave."""
    scratch = take_scratch(job, control, tag)
    if not (_norm_phase(job, control, tag, scratch) and _project_phase(job, control, tag)):
        return False
    if not (_latent_phase(job, control, tag, scratch) and _queries_phase(job, control, tag)):
        return False
    if not (_absorb_phase(job, control, tag, scratch) and index_phases(job.index, control, tag, _INDEX, scratch)):
        return False
    if not _attend_phase(job, control, tag, scratch):
        return False
    if not (_merge_phase(job, control, tag, scratch) and _values_phase(job, control, tag, scratch)):
        return False
    return _prepare_phase(job, control, tag) and _output_phase(job, control, tag)


def _mla_stage(frame: int, control: int, tag: int) -> None:
    mla_phases(record_at(frame, FRAME), control, tag)


STAGE = Native(_mla_stage)

BLOCK_FRAME = block_frame(FRAME)


def _mla_block(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, BLOCK_FRAME)
    if mla_phases(job.mixer, control, tag):
        finish_block(job.router, job.time, control, tag, _FINISH)


BLOCK = Native(_mla_block)
