"""SwiGLU experts of one layer: y[t] = sum over the chosen experts e of weight * down_e(silu(gate_e x) * up_e x).

    begin(x, ids, weights)        prepare x; list the (token, choice) pairs by expert: *rows*
    compute(expert_ids, slabs)    any of the step's experts, in any order and any number of calls; one compiled call each:
                                      phase 0   chunk = some hidden columns of an expert, for all its rows: gate, up, silu(gate) * up, prepared for down
                                      phase 1   chunk = some output blocks of an expert, for all its rows: partial results [row, D]
    finish(out)                   out[t] = sum of weight * partial over the token's rows, in ascending expert id

Each row's partial result is the same whatever else is in the batch, and the sum has one order, so that neither batching nor the order
in which experts arrive changes a bit.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels import activations, layout
from colibri_mp.kernels.jit import Native, compiled
from colibri_mp.kernels.layout import BLOCK_ROWS, ExpertShape
from colibri_mp.kernels.linear import DEFAULT_PLANES, MATRIX, blocks_per_chunk, describe_format, multiply_blocks_at, prepare_rows, row_table
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes, barrier, done, take, thread_slot
from colibri_mp.kernels.vectors import (
    call_native3, exp16, fma16, get_f32, get_i32, get_i64, load16, record_at, set_i64, splat16, store16, store_prefix16,
)  # fmt: skip

COLUMNS_PER_CHUNK = 64
"""Hidden columns of a chunk of phase 0; a multiple of every group size but 128, for which it is 128."""
ROWS_PER_PASS = 64
"""Rows for which a chunk's gate and up results are held at a time."""
_PREPARE_TOKENS, _COMBINE_TOKENS = 8, 8

FRAME = np.dtype(
    [
        ("gate", MATRIX),
        ("up", MATRIX),
        ("down", MATRIX),
        ("up_offset", np.int64),
        ("down_offset", np.int64),
        ("chunk_columns", np.int64),
        ("chunk_prepared_bytes", np.int64),  # of those columns in a row prepared for down
        ("num_experts", np.int64),
        ("expert_ids", np.int64),  # int32 [num_experts]
        ("slabs", np.int64),  # int64 [num_experts]
        ("starts", np.int64),  # int64 [num_ids + 1]: rows of expert e are starts[e] .. starts[e + 1]
        ("num_ids", np.int64),
        ("gate_rows", np.int64),  # address tables int64 [rows]: x prepared for gate, for up, hidden prepared for down, partial results
        ("up_rows", np.int64),
        ("hidden_rows", np.int64),
        ("partial_rows", np.int64),
        ("scratch", np.int64),  # per thread slot: tables int64 [2, ROWS_PER_PASS], then float32 [2, ROWS_PER_PASS, chunk_columns]
        ("scratch_bytes", np.int64),
        ("num_threads", np.int64),
    ]
)


@compiled
def _first_row(job: Any, expert: int) -> int:
    expert_id = get_i32(job.expert_ids + 4 * expert)
    return get_i64(job.starts + 8 * min(expert_id, job.num_ids))


@compiled
def _end_row(job: Any, expert: int) -> int:
    expert_id = get_i32(job.expert_ids + 4 * expert)
    return get_i64(job.starts + 8 * min(expert_id + 1, job.num_ids))


@compiled
def _silu_product(gate: int, up: int, columns: int) -> None:
    """gate = silu(gate) * up over `columns` float32, a multiple of 16."""
    one = splat16(np.float32(1.0))
    zero = splat16(np.float32(0.0))
    for column in range(0, columns, 16):
        g = load16(gate + 4 * column)
        store16(gate + 4 * column, g / (one + exp16(zero - g)) * load16(up + 4 * column))


@compiled
def _hidden_chunk(job: Any, slab: int, chunk: int, first_row: int, end_row: int, scratch: int) -> None:
    """Hidden columns of one chunk for all rows of an expert, prepared for down."""
    columns = min(job.chunk_columns, job.gate.rows - chunk * job.chunk_columns)
    first_block = chunk * job.chunk_columns // 16
    end_block = first_block + (columns + 15) // 16
    gates, ups = scratch, scratch + 8 * ROWS_PER_PASS
    values = scratch + 16 * ROWS_PER_PASS
    half = 4 * job.chunk_columns * ROWS_PER_PASS
    for i in range(min(ROWS_PER_PASS, end_row - first_row)):  # a block's results go to column 16 * block: counted from the chunk's first
        place = values + 4 * job.chunk_columns * i - 64 * first_block
        set_i64(gates + 8 * i, place)
        set_i64(ups + 8 * i, place + half)
    for row in range(first_row, end_row, ROWS_PER_PASS):
        count = min(ROWS_PER_PASS, end_row - row)
        multiply_blocks_at(job.gate, slab, first_block, end_block, job.gate_rows + 8 * row, gates, count)
        multiply_blocks_at(job.up, slab + job.up_offset, first_block, end_block, job.up_rows + 8 * row, ups, count)
        for i in range(count):
            gate = values + 4 * job.chunk_columns * i
            _silu_product(gate, gate + half, (columns + 15) // 16 * 16)
            hidden = get_i64(job.hidden_rows + 8 * (row + i)) + chunk * job.chunk_prepared_bytes
            call_native3(job.down.prepare, gate, hidden, columns)


def _compute_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    slot = thread_slot(control, tag, job.num_threads)
    if slot < 0:
        return
    scratch = job.scratch + slot * job.scratch_bytes
    per_expert = (job.gate.rows + job.chunk_columns - 1) // job.chunk_columns
    num_chunks = job.num_experts * per_expert
    chunk = take(control, tag, 0, num_chunks)
    while chunk >= 0:
        expert = chunk // per_expert
        slab = get_i64(job.slabs + 8 * expert)
        _hidden_chunk(job, slab, chunk % per_expert, _first_row(job, expert), _end_row(job, expert), scratch)
        done(control, 0)
        chunk = take(control, tag, 0, num_chunks)
    if not barrier(control, tag, 0, num_chunks):
        return
    blocks = blocks_per_chunk(job.down)
    per_expert = (job.down.num_blocks + blocks - 1) // blocks
    num_chunks = job.num_experts * per_expert
    chunk = take(control, tag, 1, num_chunks)
    while chunk >= 0:
        expert = chunk // per_expert
        down = get_i64(job.slabs + 8 * expert) + job.down_offset
        first = chunk % per_expert * blocks
        row, end_row = _first_row(job, expert), _end_row(job, expert)
        hidden, partial = job.hidden_rows + 8 * row, job.partial_rows + 8 * row
        multiply_blocks_at(job.down, down, first, min(first + blocks, job.down.num_blocks), hidden, partial, end_row - row)
        done(control, 1)
        chunk = take(control, tag, 1, num_chunks)
    barrier(control, tag, 1, num_chunks)


COMPUTE_STAGE = Native(_compute_stage)

PREPARE_FRAME = np.dtype(
    [("gate", MATRIX), ("up", MATRIX), ("x", np.int64), ("for_gate", np.int64), ("for_up", np.int64), ("num_tokens", np.int64)]
)


def _prepare_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, PREPARE_FRAME)
    num_chunks = (job.num_tokens + _PREPARE_TOKENS - 1) // _PREPARE_TOKENS
    chunk = take(control, tag, 0, num_chunks)
    while chunk >= 0:
        first, last = chunk * _PREPARE_TOKENS, min(job.num_tokens, (chunk + 1) * _PREPARE_TOKENS)
        prepare_rows(job.gate, job.x, job.gate.cols * 4, job.for_gate, first, last)
        if job.for_up != job.for_gate:
            prepare_rows(job.up, job.x, job.up.cols * 4, job.for_up, first, last)
        done(control, 0)
        chunk = take(control, tag, 0, num_chunks)
    barrier(control, tag, 0, num_chunks)


PREPARE_STAGE = Native(_prepare_stage)

COMBINE_FRAME = np.dtype(
    [
        ("partial_rows", np.int64),
        ("row_of", np.int64),  # int64 [T, K]: the token's rows in ascending expert id
        ("weight_of", np.int64),  # float32 [T, K]
        ("counts", np.int64),  # int64 [T]: how many of them
        ("top_k", np.int64),
        ("out", np.int64),
        ("hidden", np.int64),
        ("num_tokens", np.int64),
    ]
)


@compiled
def _combine_token(job: Any, t: int) -> None:
    count = get_i64(job.counts + 8 * t)
    rows, weights = job.row_of + 8 * t * job.top_k, job.weight_of + 4 * t * job.top_k
    out = job.out + 4 * t * job.hidden
    for column in range(0, job.hidden - 15, 16):
        acc = splat16(np.float32(0.0))
        for k in range(count):
            partial = get_i64(job.partial_rows + 8 * get_i64(rows + 8 * k))
            acc = fma16(splat16(get_f32(weights + 4 * k)), load16(partial + 4 * column), acc)
        store16(out + 4 * column, acc)
    for column in range(job.hidden // 16 * 16, job.hidden):
        rest = splat16(np.float32(0.0))
        for k in range(count):
            partial = get_i64(job.partial_rows + 8 * get_i64(rows + 8 * k))
            rest = fma16(splat16(get_f32(weights + 4 * k)), splat16(get_f32(partial + 4 * column)), rest)
        store_prefix16(out + 4 * column, rest, 1)


def _combine_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, COMBINE_FRAME)
    num_chunks = (job.num_tokens + _COMBINE_TOKENS - 1) // _COMBINE_TOKENS
    chunk = take(control, tag, 0, num_chunks)
    while chunk >= 0:
        for t in range(chunk * _COMBINE_TOKENS, min(job.num_tokens, (chunk + 1) * _COMBINE_TOKENS)):
            _combine_token(job, t)
        done(control, 0)
        chunk = take(control, tag, 0, num_chunks)
    barrier(control, tag, 0, num_chunks)


COMBINE_STAGE = Native(_combine_stage)


@compiled
def _list_rows(ids: Any, weights: Any, starts: Any, next_row: Any, token_of: Any, choice_of: Any, row_of: Any, weight_of: Any, counts: Any) -> int:
    """Rows in the order of (expert id, token): a counting sort. starts, next_row: int64 [num_ids + 1]. Returns the number of rows."""
    num_tokens, top_k = ids.shape
    starts[:] = 0
    counts[:num_tokens] = 0
    for t in range(num_tokens):
        for k in range(top_k):
            if ids[t, k] >= 0:
                starts[ids[t, k] + 1] += 1
    for expert in range(starts.size - 1):
        starts[expert + 1] += starts[expert]
        next_row[expert] = starts[expert]
    for t in range(num_tokens):
        for k in range(top_k):
            if ids[t, k] >= 0:
                row = next_row[ids[t, k]]
                next_row[ids[t, k]] += 1
                token_of[row], choice_of[row] = t, k
    for row in range(starts[-1]):
        t = token_of[row]
        row_of[t * top_k + counts[t]] = row
        weight_of[t * top_k + counts[t]] = weights[t, choice_of[row]]
        counts[t] += 1
    return int(starts[-1])


@compiled
def _fill_table(table: Any, base: int, stride: int, token_of: Any, num_rows: int) -> None:
    for row in range(num_rows):
        table[row] = base + stride * token_of[row]


@compiled
def _select_experts(expert_ids: Any, slabs: Any, starts: Any, own_ids: Any, own_slabs: Any) -> int:
    """Copy the arguments of `compute`; how many rows they have."""
    num_rows = 0
    for i in range(expert_ids.size):
        own_ids[i], own_slabs[i] = expert_ids[i], slabs[i]
        if expert_ids[i] + 1 < starts.size:
            num_rows += starts[expert_ids[i] + 1] - starts[expert_ids[i]]
    return int(num_rows)


class _Sizes:
    """Bytes of the buffers of a stage."""

    def __init__(self, shape: ExpertShape, max_tokens: int, top_k: int, planes: int) -> None:
        group = shape.down.group_size
        self.chunk_columns = max(COLUMNS_PER_CHUNK, group)
        self.rows = max_tokens * top_k
        self.for_gate = activations.prepared_bytes(shape.gate, shape.hidden, planes)
        self.for_up = activations.prepared_bytes(shape.up, shape.hidden, planes)
        self.shared_input = activations.form(shape.gate) == activations.form(shape.up)
        self.hidden = activations.prepared_bytes(shape.down, shape.width, planes)
        self.partial = layout.num_blocks(shape.hidden) * BLOCK_ROWS * 4
        self.chunk_prepared = activations.prepared_bytes(shape.down, self.chunk_columns * 8, planes) // 8
        self.thread = 2 * 8 * ROWS_PER_PASS + 2 * 4 * ROWS_PER_PASS * self.chunk_columns

    def total(self, max_tokens: int, num_threads: int) -> int:
        inputs = self.for_gate + (0 if self.shared_input else self.for_up)
        tables = 9 * 8
        return max_tokens * inputs + self.rows * (self.hidden + self.partial + tables) + num_threads * self.thread


def scratch_bytes(shape: ExpertShape, max_tokens: int, top_k: int, planes: int = DEFAULT_PLANES, num_threads: int = 16) -> int:
    """Bytes that an `ExpertStage` allocates, up to a few KiB (tables by expert id); for the memory plan."""
    return _Sizes(shape, max_tokens, top_k, planes).total(max_tokens, num_threads)


class ExpertStage:
    """The experts of layers of one shape; owns its buffers (`scratch_bytes`). See the module docstring for the three calls of a step."""

    def __init__(self, team: ThreadTeam, shape: ExpertShape, max_tokens: int, top_k: int, planes: int = DEFAULT_PLANES) -> None:
        self.shape, self.max_tokens, self.top_k = shape, max_tokens, top_k
        self._team = team
        self._sizes = sizes = _Sizes(shape, max_tokens, top_k, planes)
        self._for_gate = aligned_bytes(max_tokens * sizes.for_gate)
        self._for_up = self._for_gate if sizes.shared_input else aligned_bytes(max_tokens * sizes.for_up)
        self._hidden = aligned_bytes(sizes.rows * sizes.hidden)
        self._partial = aligned_bytes(sizes.rows * sizes.partial)
        self._scratch = aligned_bytes(team.num_threads * sizes.thread)
        self._gate_rows, self._up_rows, self._token_of, self._choice_of, self._row_of = np.zeros((5, sizes.rows), np.int64)
        self._hidden_rows = row_table(self._hidden.ctypes.data, sizes.hidden, sizes.rows)
        self._partial_rows = row_table(self._partial.ctypes.data, sizes.partial, sizes.rows)
        self._weight_of = np.zeros(sizes.rows, np.float32)
        self._counts = np.zeros(max_tokens, np.int64)
        self._prepare, self._compute, self._combine = np.zeros(1, PREPARE_FRAME), np.zeros(1, FRAME), np.zeros(1, COMBINE_FRAME)
        self._fill_frames(planes)
        self._grow_ids(64)
        self._rows = self._rows_done = self._tokens = 0

    def _fill_frames(self, planes: int) -> None:
        shape, sizes = self.shape, self._sizes
        gate, up = (describe_format(kind, shape.width, shape.hidden, planes) for kind in (shape.gate, shape.up))
        for frame in (self._prepare, self._compute):
            frame["gate"], frame["up"] = gate, up
        self._prepare["for_gate"], self._prepare["for_up"] = self._for_gate.ctypes.data, self._for_up.ctypes.data
        compute, combine = self._compute, self._combine
        compute["down"] = describe_format(shape.down, shape.hidden, shape.width, planes)
        compute["up_offset"], compute["down_offset"] = shape.up_offset, shape.down_offset
        compute["chunk_columns"], compute["chunk_prepared_bytes"] = sizes.chunk_columns, sizes.chunk_prepared
        compute["scratch"], compute["scratch_bytes"] = self._scratch.ctypes.data, sizes.thread
        compute["num_threads"] = self._team.num_threads
        for name in ("gate_rows", "up_rows", "hidden_rows", "partial_rows"):
            compute[name] = getattr(self, f"_{name}").ctypes.data
        for name in ("partial_rows", "row_of", "weight_of", "counts"):
            combine[name] = getattr(self, f"_{name}").ctypes.data
        combine["top_k"], combine["hidden"] = self.top_k, shape.hidden

    def _grow_ids(self, num_ids: int) -> None:
        """Tables by expert id, for ids below `num_ids`."""
        self._starts_buffer, self._next_row = np.zeros(num_ids + 1, np.int64), np.zeros(num_ids + 1, np.int64)
        self._expert_ids, self._slabs = np.zeros(num_ids, np.int32), np.zeros(num_ids, np.int64)
        self._compute["starts"] = self._starts_buffer.ctypes.data
        self._compute["expert_ids"], self._compute["slabs"] = self._expert_ids.ctypes.data, self._slabs.ctypes.data

    def begin(self, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        """Start a step: x [T, D], ids int32 [T, K] (negative: not for us), weights float32 [T, K]; nothing is kept of the arrays."""
        num_tokens = len(x)
        assert x.shape == (num_tokens, self.shape.hidden) and num_tokens <= self.max_tokens and x.dtype == np.float32 and x.flags.c_contiguous
        assert ids.shape == weights.shape == (num_tokens, self.top_k) and ids.dtype == np.int32 and weights.dtype == np.float32
        num_ids = int(ids.max(initial=-1)) + 1
        if num_ids >= len(self._starts_buffer):
            self._grow_ids(2 * num_ids)
        self._starts = self._starts_buffer[: num_ids + 1]
        self._rows = _list_rows(
            ids, weights, self._starts, self._next_row, self._token_of, self._choice_of, self._row_of, self._weight_of, self._counts
        )
        _fill_table(self._gate_rows, int(self._prepare["for_gate"][0]), self._sizes.for_gate, self._token_of, self._rows)
        _fill_table(self._up_rows, int(self._prepare["for_up"][0]), self._sizes.for_up, self._token_of, self._rows)
        self._compute["num_ids"] = num_ids
        self._rows_done, self._tokens = 0, num_tokens
        self._prepare["x"], self._prepare["num_tokens"] = x.ctypes.data, num_tokens
        self._team.run(PREPARE_STAGE, self._prepare, max_helpers=num_tokens // (2 * _PREPARE_TOKENS))

    def compute(self, expert_ids: npt.NDArray[np.int32], slab_addresses: npt.NDArray[np.int64]) -> None:
        """Partial results of some experts: ids int32 [n], addresses int64 [n] of their slabs, 64-aligned, unchanged until this returns."""
        if len(expert_ids) > len(self._expert_ids):
            raise ValueError(f"{len(expert_ids)} experts in one call, {len(self._expert_ids)} ids are known to this step")
        self._rows_done += _select_experts(expert_ids, slab_addresses, self._starts, self._expert_ids, self._slabs)
        self._compute["num_experts"] = len(expert_ids)
        self._team.run(COMPUTE_STAGE, self._compute)

    def finish(self, out: npt.NDArray[np.float32]) -> None:
        """out [T, D] = the weighted sums; every routed expert must have been computed, once."""
        assert out.shape == (self._tokens, self.shape.hidden) and out.dtype == np.float32 and out.flags.c_contiguous
        assert self._rows_done == self._rows, f"{self._rows_done} of {self._rows} (token, expert) rows were computed"
        self._combine["out"], self._combine["num_tokens"] = out.ctypes.data, self._tokens
        self._team.run(COMBINE_STAGE, self._combine, max_helpers=self._tokens // _COMBINE_TOKENS)
