"""The compiled gated delta net: its frame, and the five phases between which the team meets.

0  norm         rows of x -> RMS norm -> prepared rows for qkv, z, b and a
1  project      blocks of the four matrices -> their rows of all tokens
2  advance      sequences x key heads (`delta_rows`): convolution, recurrence, norm and gate of the heads; z becomes the result
3  prepare      rows of the result -> prepared rows for out
4  output       blocks of rows of out; x += the product
"""

from typing import Any

import numpy as np

from colibri_mp.kernels.block import block_frame, finish_block
from colibri_mp.kernels.delta_rows import BLOCK_ROWS, advance_rows, end_run, start_run
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.linear import MATRIX, prepare_rows
from colibri_mp.kernels.norm import rms_norm_row
from colibri_mp.kernels.stage_parts import (
    TOKENS_A_CHUNK,
    add_product_chunk,
    multiply_chunk,
    num_block_chunks,
    num_token_chunks,
    prepare_row,
    take_scratch,
)
from colibri_mp.kernels.team import barrier, done, take
from colibri_mp.kernels.vectors import get_i32, record_at

STEP_FIELDS = ("num_tokens", "runs", "chains", "num_chains", "states", "tails", "x")
"""Fields that change from call to call, int64; they come first in FRAME. runs: int32 [N, 4], see `Batch.state_runs`; chains: int32
[num_chains + 1], the first run of each sequence, and N."""

_SHAPE_FIELDS = (
    *("hidden", "num_key_heads", "num_value_heads", "key_dim", "value_dim", "group_size", "conv_tokens"),
    *("num_tiles", "tile_row_bytes", "head_bytes", "slot_bytes", "conv_bytes"),
)
_VECTOR_FIELDS = ("norm_weight", "conv", "rate", "dt_bias", "head_norm")
_ROW_FIELDS = (
    *("qkv", "z", "b", "a", "out", "qkv_stride", "z_stride", "gate_stride", "out_stride"),
    *("qkv_rows", "z_rows", "b_rows", "a_rows", "out_rows"),
    *("qkv_prepared", "z_prepared", "b_prepared", "a_prepared", "out_prepared"),
    *("qkv_xs", "z_xs", "b_xs", "a_xs", "out_xs"),
)
_SCRATCH_FIELDS = (
    *("q_offset", "k_offset", "v_offset", "decay_offset", "beta_offset", "head_offset"),
    *("scratch", "scratch_bytes", "num_scratches"),
)
MATRICES = ("qkv", "z", "b", "a", "out")

FRAME = np.dtype(
    [
        *[(name, np.int64) for name in STEP_FIELDS],
        *[(f"{name}_matrix", MATRIX) for name in MATRICES],
        *[(name, np.int64) for name in (*_SHAPE_FIELDS, *_VECTOR_FIELDS, *_ROW_FIELDS, *_SCRATCH_FIELDS)],
        *[(name, np.float64) for name in ("eps", "scale")],
    ]
)
"""What a call of the stage knows."""

NUM_PHASES = 5
_NORM, _PROJECT, _ADVANCE, _PREPARE, _OUTPUT, _FINISH = (fixed(phase) for phase in range(NUM_PHASES + 1))


@compiled
def _norm_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _NORM, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        for t in range(chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)):
            rms_norm_row(job.x + t * job.hidden * 4, job.norm_weight, scratch, job.hidden, np.float32(job.eps))
            prepare_row(job.qkv_matrix, scratch, job.qkv_prepared, t)
            if job.z_prepared != job.qkv_prepared:
                prepare_row(job.z_matrix, scratch, job.z_prepared, t)
            if job.b_prepared not in (job.qkv_prepared, job.z_prepared):
                prepare_row(job.b_matrix, scratch, job.b_prepared, t)
            if job.a_prepared not in (job.qkv_prepared, job.z_prepared, job.b_prepared):
                prepare_row(job.a_matrix, scratch, job.a_prepared, t)
        done(control, _NORM)
        chunk = take(control, tag, _NORM, num_chunks)
    return barrier(control, tag, _NORM, num_chunks)


@compiled
def _project_phase(job: Any, control: int, tag: int) -> bool:
    qkv_end = num_block_chunks(job.qkv_matrix)
    z_end = qkv_end + num_block_chunks(job.z_matrix)
    b_end = z_end + num_block_chunks(job.b_matrix)
    num_chunks = b_end + num_block_chunks(job.a_matrix)
    chunk = take(control, tag, _PROJECT, num_chunks)
    while chunk >= 0:
        if chunk < qkv_end:
            multiply_chunk(job.qkv_matrix, chunk, job.qkv_xs, job.qkv_rows, job.num_tokens)
        elif chunk < z_end:
            multiply_chunk(job.z_matrix, chunk - qkv_end, job.z_xs, job.z_rows, job.num_tokens)
        elif chunk < b_end:
            multiply_chunk(job.b_matrix, chunk - z_end, job.b_xs, job.b_rows, job.num_tokens)
        else:
            multiply_chunk(job.a_matrix, chunk - b_end, job.a_xs, job.a_rows, job.num_tokens)
        done(control, _PROJECT)
        chunk = take(control, tag, _PROJECT, num_chunks)
    return barrier(control, tag, _PROJECT, num_chunks)


@compiled
def _advance_phase(job: Any, control: int, tag: int, scratch: int) -> bool:
    num_chunks = job.num_chains * job.num_key_heads
    chunk = take(control, tag, _ADVANCE, num_chunks) if scratch != 0 else -1
    while chunk >= 0:
        _advance_chain(job, chunk // job.num_key_heads, chunk % job.num_key_heads, scratch)
        done(control, _ADVANCE)
        chunk = take(control, tag, _ADVANCE, num_chunks)
    return barrier(control, tag, _ADVANCE, num_chunks)


@compiled
def _advance_chain(job: Any, chain: int, key_head: int, scratch: int) -> None:
    """The runs of one sequence, one after the other."""
    for run in range(get_i32(job.chains + 4 * chain), get_i32(job.chains + 4 * chain + 4)):
        place = job.runs + 16 * run
        first, count = get_i32(place), get_i32(place + 4)
        source, target = get_i32(place + 8), get_i32(place + 12)
        start_run(job, key_head, source, target)
        for begin in range(first, first + count, BLOCK_ROWS):
            advance_rows(job, key_head, first, begin, min(first + count, begin + BLOCK_ROWS), target, scratch)
        end_run(job, key_head, first, count, target)


@compiled
def _prepare_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_token_chunks(job)
    chunk = take(control, tag, _PREPARE, num_chunks)
    while chunk >= 0:
        first, last = chunk * TOKENS_A_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_A_CHUNK)
        prepare_rows(job.out_matrix, job.z, job.z_stride, job.out_prepared, first, last)
        done(control, _PREPARE)
        chunk = take(control, tag, _PREPARE, num_chunks)
    return barrier(control, tag, _PREPARE, num_chunks)


@compiled
def _output_phase(job: Any, control: int, tag: int) -> bool:
    num_chunks = num_block_chunks(job.out_matrix)
    chunk = take(control, tag, _OUTPUT, num_chunks)
    while chunk >= 0:
        add_product_chunk(job, job.out_matrix, chunk, job.out_xs)
        done(control, _OUTPUT)
        chunk = take(control, tag, _OUTPUT, num_chunks)
    return barrier(control, tag, _OUTPUT, num_chunks)


@compiled
def delta_net_phases(job: Any, control: int, tag: int) -> bool:
    """All of it, `NUM_PHASES` phases. False: the job is over, leave."""
    scratch = take_scratch(job, control, tag)
    if not _norm_phase(job, control, tag, scratch):
        return False
    if not _project_phase(job, control, tag):
        return False
    if not _advance_phase(job, control, tag, scratch):
        return False
    return _prepare_phase(job, control, tag) and _output_phase(job, control, tag)


def _delta_net_stage(frame: int, control: int, tag: int) -> None:
    delta_net_phases(record_at(frame, FRAME), control, tag)


STAGE = Native(_delta_net_stage)

BLOCK_FRAME = block_frame(FRAME)


def _delta_net_block(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, BLOCK_FRAME)
    if delta_net_phases(job.mixer, control, tag):
        finish_block(job.router, job.time, control, tag, _FINISH)


BLOCK = Native(_delta_net_block)
