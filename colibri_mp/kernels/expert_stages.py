"""The compiled stages of `expert`: what they read (frames), and what each chunk does. All addresses and sizes int64.

A *row* is a (token, choice) pair; rows are numbered in the order of (expert id, token), so that an expert's rows are consecutive.
"""

from typing import Any

import numpy as np

from colibri_mp.kernels.jit import Native, carray, compiled
from colibri_mp.kernels.linear import MATRIX, blocks_per_chunk, multiply_blocks_at, prepare_rows
from colibri_mp.kernels.team import PHASE_0, PHASE_1, PHASE_2, PHASE_3, barrier, done, take, thread_slot
from colibri_mp.kernels.vectors import (
    call_native3,
    exp16,
    fma16,
    get_f32,
    get_i32,
    get_i64,
    load16,
    max16,
    min16,
    pointer_f32,
    pointer_i32,
    pointer_i64,
    record_at,
    set_i64,
    splat16,
    store16,
    store_prefix16,
)  # fmt: skip

ROWS_PER_PASS = 64
"""Rows for which a chunk's gate and up results are held at a time."""
TOKENS_PER_CHUNK = 8
"""Of the prepare and combine stages."""


# ---- begin: list the rows, prepare the activations

PREPARE_FRAME = np.dtype(
    [
        ("gate", MATRIX),
        ("up", MATRIX),
        *[(name, np.int64) for name in (
            "x", "ids", "weights",  # float32 [T, D], int32 [T, K], float32 [T, K]
            "num_tokens", "top_k",
            "for_gate", "for_up",  # prepared rows; the same where gate and up share them
            "starts", "next_row", "num_ids",  # int64 [num_ids + 1]: rows of expert e are starts[e] .. starts[e + 1]
            "token_of", "choice_of",  # int64 [rows]
            "row_of", "weight_of", "counts",  # int64 [T, K], float32 [T, K]: a token's rows, ascending; int64 [T]: how many
            "gate_rows", "up_rows",  # address tables int64 [rows]
            "num_rows",  # address of the result, -1: an id is too large
        )],
    ]
)  # fmt: skip


@compiled
def _list_rows(job: Any) -> int:
    """A counting sort of the pairs by expert; the number of rows, or -1 (and no rows) if an id is too large."""
    ids = carray(pointer_i32(job.ids), (job.num_tokens, job.top_k))
    starts = carray(pointer_i64(job.starts), job.num_ids + 1)
    next_row = carray(pointer_i64(job.next_row), job.num_ids + 1)
    token_of = carray(pointer_i64(job.token_of), job.num_tokens * job.top_k)
    choice_of = carray(pointer_i64(job.choice_of), job.num_tokens * job.top_k)
    starts[:] = 0
    for t in range(job.num_tokens):
        for k in range(job.top_k):
            if ids[t, k] >= job.num_ids:
                starts[:] = 0
                return -1
            if ids[t, k] >= 0:
                starts[ids[t, k] + 1] += 1
    for expert in range(job.num_ids):
        starts[expert + 1] += starts[expert]
        next_row[expert] = starts[expert]
    for t in range(job.num_tokens):
        for k in range(job.top_k):
            if ids[t, k] >= 0:
                row = next_row[ids[t, k]]
                next_row[ids[t, k]] = row + 1
                token_of[row], choice_of[row] = t, k
    num_rows: int = starts[job.num_ids]
    return num_rows


@compiled
def _list_tokens(job: Any, num_rows: int) -> None:
    """Each token's rows in ascending order of expert, with their weights; each row's activations."""
    weights = carray(pointer_f32(job.weights), (job.num_tokens, job.top_k))
    counts = carray(pointer_i64(job.counts), job.num_tokens)
    row_of = carray(pointer_i64(job.row_of), (job.num_tokens, job.top_k))
    weight_of = carray(pointer_f32(job.weight_of), (job.num_tokens, job.top_k))
    counts[:] = 0
    for row in range(num_rows):
        t = get_i64(job.token_of + 8 * row)
        row_of[t, counts[t]] = row
        weight_of[t, counts[t]] = weights[t, get_i64(job.choice_of + 8 * row)]
        counts[t] += 1
        set_i64(job.gate_rows + 8 * row, job.for_gate + t * job.gate.prepared_bytes)
        set_i64(job.up_rows + 8 * row, job.for_up + t * job.up.prepared_bytes)


@compiled
def _prepare_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    """Chunk 0 lists the rows, the others prepare some tokens each. False: the job is over, leave."""
    num_chunks = 1 + (job.num_tokens + TOKENS_PER_CHUNK - 1) // TOKENS_PER_CHUNK
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        if chunk == 0:
            num_rows = _list_rows(job)
            _list_tokens(job, num_rows)
            set_i64(job.num_rows, num_rows)
        else:
            first, last = (chunk - 1) * TOKENS_PER_CHUNK, min(job.num_tokens, chunk * TOKENS_PER_CHUNK)
            prepare_rows(job.gate, job.x, job.gate.cols * 4, job.for_gate, first, last)
            if job.for_up != job.for_gate:
                prepare_rows(job.up, job.x, job.up.cols * 4, job.for_up, first, last)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


def _prepare_stage(frame: int, control: int, tag: int) -> None:
    _prepare_phase(record_at(frame, PREPARE_FRAME), control, tag, PHASE_0)


PREPARE_STAGE = Native(_prepare_stage)


# ---- compute: partial results of some experts

COMPUTE_FRAME = np.dtype(
    [
        ("gate", MATRIX),
        ("up", MATRIX),
        ("down", MATRIX),
        *[(name, np.int64) for name in (
            "up_offset", "down_offset",  # in a slab
            "gate_bias", "up_bias", "down_bias",  # likewise, 0: there are none
            "chunk_columns", "chunk_prepared_bytes",  # hidden columns of a chunk; their bytes in a row prepared for down
            "num_experts", "expert_ids", "slabs",  # int32 [num_experts], int64 [num_experts]
            "starts", "num_ids",
            "gate_rows", "up_rows", "hidden_rows", "partial_rows",  # tables of addresses
            "scratch", "scratch_bytes", "num_threads",  # a thread's: tables int64 [2, pass], float32 [2, pass, chunk_columns]
        )],
        ("limit", np.float64), ("alpha", np.float64),  # of `specs.ClampedSwiGLU`; limit 0: silu(gate) * up
    ]
)  # fmt: skip


@compiled
def _first_row(job: Any, expert: int) -> int:
    """First row of an expert of the call."""
    return int(get_i64(job.starts + 8 * min(get_i32(job.expert_ids + 4 * expert), job.num_ids)))


@compiled
def _end_row(job: Any, expert: int) -> int:
    """The row after its last."""
    return int(get_i64(job.starts + 8 * min(get_i32(job.expert_ids + 4 * expert) + 1, job.num_ids)))


@compiled
def _silu_product(gate: int, up: int, columns: int) -> None:
    """gate = silu(gate) * up over `columns` float32, a multiple of 16."""
    one, zero = splat16(np.float32(1.0)), splat16(np.float32(0.0))
    for i in range(0, 4 * columns, 64):
        g = load16(gate + i)
        store16(gate + i, g / (one + exp16(zero - g)) * load16(up + i))


@compiled
def _clamped_product(gate: int, up: int, columns: int, limit: np.float32, alpha: np.float32) -> None:
    """gate = (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up from both sides."""
    one, zero, largest = splat16(np.float32(1.0)), splat16(np.float32(0.0)), splat16(limit)
    for i in range(0, 4 * columns, 64):
        g = min16(load16(gate + i), largest)
        u = max16(min16(load16(up + i), largest), zero - largest)
        store16(gate + i, (u + one) * (g / (one + exp16(zero - splat16(alpha) * g))))


@compiled
def _add_blocks(row: int, addend: int, num_blocks: int) -> None:
    """row += addend over whole blocks of 16 float32."""
    for i in range(0, 64 * num_blocks, 64):
        store16(row + i, load16(row + i) + load16(addend + i))


@compiled
def _activate(job: Any, slab: int, gate: int, up: int, first_block: int, num_blocks: int) -> None:
    """Biases and activation over the columns of some blocks; the result replaces `gate`."""
    if job.gate_bias != 0:
        _add_blocks(gate, slab + job.gate_bias + 64 * first_block, num_blocks)
        _add_blocks(up, slab + job.up_bias + 64 * first_block, num_blocks)
    if job.limit > 0.0:
        _clamped_product(gate, up, 16 * num_blocks, np.float32(job.limit), np.float32(job.alpha))
    else:
        _silu_product(gate, up, 16 * num_blocks)


@compiled
def _point_to_scratch(job: Any, scratch: int, first_block: int, count: int) -> None:
    """Tables of where gate and up results go. Tile kernels add 64 bytes for each block: count from the chunk's first one."""
    row_bytes = 4 * job.chunk_columns
    for i in range(count):
        place = scratch + 16 * ROWS_PER_PASS + row_bytes * i - 64 * first_block
        set_i64(scratch + 8 * i, place)
        set_i64(scratch + 8 * ROWS_PER_PASS + 8 * i, place + row_bytes * ROWS_PER_PASS)


@compiled
def _hidden_chunk(job: Any, slab: int, chunk: int, first_row: int, end_row: int, scratch: int) -> None:
    """Hidden columns of one chunk for all rows of an expert, prepared for down."""
    columns = min(job.chunk_columns, job.gate.rows - chunk * job.chunk_columns)
    first_block = chunk * job.chunk_columns // 16
    end_block = first_block + (columns + 15) // 16
    _point_to_scratch(job, scratch, first_block, min(ROWS_PER_PASS, end_row - first_row))
    gates, ups = scratch, scratch + 8 * ROWS_PER_PASS
    for row in range(first_row, end_row, ROWS_PER_PASS):
        count = min(ROWS_PER_PASS, end_row - row)
        multiply_blocks_at(job.gate, slab, first_block, end_block, job.gate_rows + 8 * row, gates, count)
        multiply_blocks_at(job.up, slab + job.up_offset, first_block, end_block, job.up_rows + 8 * row, ups, count)
        for i in range(count):
            gate, up = get_i64(gates + 8 * i) + 64 * first_block, get_i64(ups + 8 * i) + 64 * first_block
            _activate(job, slab, gate, up, first_block, end_block - first_block)
            hidden = get_i64(job.hidden_rows + 8 * (row + i)) + chunk * job.chunk_prepared_bytes
            call_native3(job.down.prepare, gate, hidden, columns)


@compiled
def _hidden_phase(job: Any, control: int, tag: int, phase: int, scratch: int) -> bool:
    per_expert = (job.gate.rows + job.chunk_columns - 1) // job.chunk_columns
    num_chunks = job.num_experts * per_expert
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        expert = chunk // per_expert
        first, end = _first_row(job, expert), _end_row(job, expert)
        _hidden_chunk(job, get_i64(job.slabs + 8 * expert), chunk % per_expert, first, end, scratch)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def _down_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    blocks = blocks_per_chunk(job.down)
    per_expert = (job.down.num_blocks + blocks - 1) // blocks
    num_chunks = job.num_experts * per_expert
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        expert, first = chunk // per_expert, chunk % per_expert * blocks
        slab, last = get_i64(job.slabs + 8 * expert), min(first + blocks, job.down.num_blocks)
        row, end = _first_row(job, expert), _end_row(job, expert)
        hidden, partial = job.hidden_rows + 8 * row, job.partial_rows + 8 * row
        multiply_blocks_at(job.down, slab + job.down_offset, first, last, hidden, partial, end - row)
        if job.down_bias != 0:
            for place in range(partial, partial + 8 * (end - row), 8):
                _add_blocks(get_i64(place) + 64 * first, slab + job.down_bias + 64 * first, last - first)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


def _compute_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, COMPUTE_FRAME)
    slot = thread_slot(control, tag, job.num_threads)
    if slot >= 0 and _hidden_phase(job, control, tag, PHASE_0, job.scratch + slot * job.scratch_bytes):
        _down_phase(job, control, tag, PHASE_1)


COMPUTE_STAGE = Native(_compute_stage)


# ---- finish: weighted sums

COMBINE_FRAME = np.dtype(
    [
        (name, np.int64)
        for name in ("partial_rows", "row_of", "weight_of", "counts", "top_k", "out", "hidden", "num_tokens")
    ]
)


@compiled
def _combine_token(job: Any, t: int) -> None:
    """out[t]: the products are added to zero one by one, in ascending order of expert, each addition fused or not as `emit.fma` says."""
    count = get_i64(job.counts + 8 * t)
    rows, weights = job.row_of + 8 * t * job.top_k, job.weight_of + 4 * t * job.top_k
    out = job.out + 4 * t * job.hidden
    for column in range(0, job.hidden, 16):
        acc = splat16(np.float32(0.0))
        for k in range(count):
            partial = get_i64(job.partial_rows + 8 * get_i64(rows + 8 * k))
            acc = fma16(splat16(get_f32(weights + 4 * k)), load16(partial + 4 * column), acc)
        store_prefix16(out + 4 * column, acc, min(16, job.hidden - column))


@compiled
def _combine_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    num_chunks = (job.num_tokens + TOKENS_PER_CHUNK - 1) // TOKENS_PER_CHUNK
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        for t in range(chunk * TOKENS_PER_CHUNK, min(job.num_tokens, (chunk + 1) * TOKENS_PER_CHUNK)):
            _combine_token(job, t)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


def _combine_stage(frame: int, control: int, tag: int) -> None:
    _combine_phase(record_at(frame, COMBINE_FRAME), control, tag, PHASE_0)


COMBINE_STAGE = Native(_combine_stage)


# ---- all of it at once, when every expert of the step is there

STEP_FRAME = np.dtype([("prepare", PREPARE_FRAME), ("compute", COMPUTE_FRAME), ("combine", COMBINE_FRAME)])


def _step_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, STEP_FRAME)
    slot = thread_slot(control, tag, job.compute.num_threads)
    if slot < 0 or not _prepare_phase(job.prepare, control, tag, PHASE_0):
        return
    if not _hidden_phase(job.compute, control, tag, PHASE_1, job.compute.scratch + slot * job.compute.scratch_bytes):
        return
    if _down_phase(job.compute, control, tag, PHASE_2):
        _combine_phase(job.combine, control, tag, PHASE_3)


STEP_STAGE = Native(_step_stage)


@compiled
def count_rows(expert_ids: Any, num_experts: int, starts: Any) -> int:
    """How many rows these experts have."""
    num_rows = 0
    for i in range(num_experts):
        if expert_ids[i] + 1 < starts.size:
            num_rows += starts[expert_ids[i] + 1] - starts[expert_ids[i]]
    return num_rows
