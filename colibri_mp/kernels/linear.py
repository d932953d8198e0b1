"""Matrix products y = x W^T (+ bias) from prepared rows and tile kernels.

For stages that use several matrices (attention, router, experts), inside compiled code:

    FRAME = np.dtype([("q", MATRIX), ("x", np.int64), ...])              # a matrix is a record inside the stage's frame
    frame["q"] = describe(weight, planes)                                 # Python, once; keeps nothing alive: the stage holds `weight`

    prepare_rows(job.q, x, x_stride, prepared, t0, t1)                    # float32 rows -> prepared rows, any tokens, any thread
    multiply_blocks(job.q, b0, b1, xs, ys, num_tokens)                    # 16-row blocks [b0, b1) for the tokens of two address tables

`xs` and `ys` are addresses of int64 [num_tokens]: of each token's prepared row, and of the row its results go to (`row_table`
makes them for contiguous buffers, once, since buffers do not move; experts gather and scatter with their own). Block b writes 16
float32 at column 16 * b, so an output row needs room for 16 * num_blocks values: the rows of W are padded with zeros.

Prepared rows take `job.q.prepared_bytes` each; matrices of equal `job.q.form` and equal columns share them. A chunk of about
`blocks_per_chunk` blocks is a good unit of work for `team.take`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.formats import Format
from colibri_mp.kernels import activations, layout
from colibri_mp.kernels.jit import Native, compiled
from colibri_mp.kernels.layout import BLOCK_ROWS, PackedMatrix
from colibri_mp.kernels.team import PHASE_0, PHASE_1, ThreadTeam, aligned_bytes, barrier, done, take
from colibri_mp.kernels.tiles import TILE_TOKENS, tile_kernels
from colibri_mp.kernels.vectors import call_native3, call_native5, get_f32, record_at, set_f32

DEFAULT_PLANES = 3
"""Activations as 3 int8 planes: 23 bits, the accuracy of float32. 2 (15 bits) and 1 (8 bits) are opt-in."""

MATRIX = np.dtype(
    [
        ("data", np.int64),  # address of block 0
        ("rows", np.int64),
        ("cols", np.int64),
        ("num_blocks", np.int64),
        ("block_bytes", np.int64),
        ("num_steps", np.int64),
        ("form", np.int64),  # `activations.form`
        ("prepared_bytes", np.int64),  # of one token's prepared row
        ("prepare", np.int64),  # addresses of compiled functions
        ("tile", np.int64),
        ("single", np.int64),
    ]
)
"""A packed matrix, and the kernels for its format, as compiled code sees it."""

CHUNK_BYTES = 64 * 1024
"""Weights of a chunk: some 5 us of decode for one thread, and at home in a second-level cache for prefill."""


def describe(weight: PackedMatrix, planes: int = DEFAULT_PLANES) -> npt.NDArray[Any]:
    """The MATRIX record (array of shape (1,)) of a packed matrix, which the caller keeps alive.

    Compiles the kernels of its format at first use.
    """
    record = describe_format(weight.format, weight.rows, weight.cols, planes)
    record["data"] = weight.data.ctypes.data
    return record


def describe_format(matrix_format: Format, rows: int, cols: int, planes: int = DEFAULT_PLANES) -> npt.NDArray[Any]:
    """As `describe`, for a matrix that has no place yet: `data` is 0 (expert slabs)."""
    sizes = layout.geometry(matrix_format, cols)
    kernels = tile_kernels(matrix_format, planes)
    record = np.zeros(1, MATRIX)
    record["rows"], record["cols"], record["num_blocks"] = rows, cols, layout.num_blocks(rows)
    record["block_bytes"], record["num_steps"] = sizes.block_bytes, sizes.num_steps
    record["form"] = activations.form(matrix_format)
    record["prepared_bytes"] = activations.prepared_bytes(matrix_format, cols, planes)
    record["prepare"] = activations.prepare_kernel(matrix_format, planes).address
    record["tile"], record["single"] = kernels.tile.address, kernels.single.address
    return record


def row_table(base_address: int, stride_bytes: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Addresses int64 [num_rows] of equally spaced rows."""
    return base_address + stride_bytes * np.arange(num_rows, dtype=np.int64)


@compiled
def prepare_rows(matrix: Any, x: int, x_stride: int, prepared: int, first_token: int, last_token: int) -> None:
    """Prepare the activations of tokens [first_token, last_token) for a matrix.

    x: address of float32 rows [.., cols], `x_stride` bytes apart; prepared: address of the prepared rows, `matrix.prepared_bytes` apart.
    """
    for t in range(first_token, last_token):
        call_native3(matrix.prepare, x + t * x_stride, prepared + t * matrix.prepared_bytes, matrix.cols)


@compiled
def _multiply_tile(matrix: Any, kernel: int, data: int, first_block: int, last_block: int, xs: int, ys: int) -> None:
    for block in range(first_block, last_block):
        call_native5(kernel, data + block * matrix.block_bytes, xs, ys, block * 64, matrix.num_steps)


@compiled
def multiply_blocks_at(
    matrix: Any, data: int, first_block: int, last_block: int, xs: int, ys: int, num_tokens: int
) -> None:
    """As `multiply_blocks`, for a matrix of this description whose block 0 is at `data` (an expert in a slab)."""
    t = 0
    while num_tokens - t >= TILE_TOKENS:
        _multiply_tile(matrix, matrix.tile, data, first_block, last_block, xs + 8 * t, ys + 8 * t)
        t += TILE_TOKENS
    while t < num_tokens:
        _multiply_tile(matrix, matrix.single, data, first_block, last_block, xs + 8 * t, ys + 8 * t)
        t += 1


@compiled
def multiply_blocks(matrix: Any, first_block: int, last_block: int, xs: int, ys: int, num_tokens: int) -> None:
    """Rows [16 * first_block, 16 * last_block) of W times each token; see the module docstring. Any split gives the same bits."""
    multiply_blocks_at(matrix, matrix.data, first_block, last_block, xs, ys, num_tokens)


@compiled
def blocks_per_chunk(matrix: Any) -> int:
    """Blocks that make a good chunk of work: about CHUNK_BYTES of weights."""
    blocks: int = CHUNK_BYTES // matrix.block_bytes
    return max(1, blocks)


FRAME = np.dtype(
    [
        ("weight", MATRIX),
        ("x", np.int64),
        ("prepared", np.int64),
        ("xs", np.int64),
        ("ys", np.int64),
        ("out", np.int64),
        ("out_stride", np.int64),
        ("bias", np.int64),  # address, or 0
        ("num_tokens", np.int64),
    ]
)
_PREPARE_TOKENS = 8


def _linear_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    weight = job.weight
    num_chunks = (job.num_tokens + _PREPARE_TOKENS - 1) // _PREPARE_TOKENS
    chunk = take(control, tag, PHASE_0, num_chunks)
    while chunk >= 0:
        last = min(job.num_tokens, (chunk + 1) * _PREPARE_TOKENS)
        prepare_rows(weight, job.x, weight.cols * 4, job.prepared, chunk * _PREPARE_TOKENS, last)
        done(control, PHASE_0)
        chunk = take(control, tag, PHASE_0, num_chunks)
    if not barrier(control, tag, PHASE_0, num_chunks):
        return
    size = blocks_per_chunk(weight)
    num_chunks = (weight.num_blocks + size - 1) // size
    chunk = take(control, tag, PHASE_1, num_chunks)
    while chunk >= 0:
        first, last = chunk * size, min(weight.num_blocks, (chunk + 1) * size)
        multiply_blocks(weight, first, last, job.xs, job.ys, job.num_tokens)
        if job.bias != 0:
            _add_bias(job.out, job.out_stride, job.num_tokens, job.bias, first * 16, min(weight.rows, last * 16))
        done(control, PHASE_1)
        chunk = take(control, tag, PHASE_1, num_chunks)
    barrier(control, tag, PHASE_1, num_chunks)


@compiled
def _add_bias(out: int, stride: int, num_tokens: int, bias: int, first_row: int, last_row: int) -> None:
    for t in range(num_tokens):
        for row in range(first_row, last_row):
            place = out + t * stride + 4 * row
            set_f32(place, get_f32(place) + get_f32(bias + 4 * row))


LINEAR_STAGE = Native(_linear_stage)


def linear(
    team: ThreadTeam,
    x: npt.NDArray[np.float32],
    weight: PackedMatrix,
    bias: npt.NDArray[np.float32] | None,
    out: npt.NDArray[np.float32],
    planes: int = DEFAULT_PLANES,
) -> None:
    """out [T, N] = x [T, K] W^T + bias [N], all float32. Allocates its scratch: for what is rare; stages of the model own theirs."""
    num_tokens, num_outputs = len(x), weight.rows
    assert x.shape == (num_tokens, weight.cols), f"x {x.shape} for W [{weight.rows}, {weight.cols}]"
    assert out.shape == (num_tokens, num_outputs), f"out {out.shape} for W [{weight.rows}, {weight.cols}]"
    assert x.dtype == out.dtype == np.float32
    frame = np.zeros(1, FRAME)
    frame["weight"] = describe(weight, planes)
    row_bytes = int(frame["weight"]["prepared_bytes"][0])
    x = np.ascontiguousarray(x)
    prepared = aligned_bytes(num_tokens * row_bytes)
    y = np.empty((num_tokens, layout.num_blocks(num_outputs) * BLOCK_ROWS), np.float32)
    xs, ys = (
        row_table(rows.ctypes.data, stride, num_tokens) for rows, stride in ((prepared, row_bytes), (y, y.strides[0]))
    )
    for name, array in (("x", x), ("prepared", prepared), ("xs", xs), ("ys", ys), ("out", y)):
        frame[name] = array.ctypes.data
    frame["out_stride"], frame["num_tokens"] = y.strides[0], num_tokens
    frame["bias"] = 0 if bias is None else bias.ctypes.data
    team.run(LINEAR_STAGE, frame)
    out[:] = y[:, :num_outputs]
