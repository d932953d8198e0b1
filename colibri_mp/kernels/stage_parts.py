"""Steps that the stages of all mixers are made of, in compiled code; `job` is the frame of any of them."""

from typing import Any

from colibri_mp.kernels.attention_rows import add_row
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.linear import blocks_per_chunk, multiply_blocks
from colibri_mp.kernels.team import thread_slot
from colibri_mp.kernels.vectors import call_native3

TOKENS_A_CHUNK = 4
"""Tokens of a chunk, in phases that go by tokens."""


@compiled
def take_scratch(job: Any, control: int, tag: int) -> int:
    """Scratch memory for this call of the stage, or 0: none is left, so take no chunk that needs any.

    A helper may enter a job again after its end has begun, so there can be more calls than threads. One that got no scratch
    does not stop the job: those that did stay until all its chunks are done.
    """
    slot = thread_slot(control, tag, job.num_scratches)
    return int(job.scratch + slot * job.scratch_bytes) if slot >= 0 else 0


@compiled
def num_token_chunks(job: Any) -> int:
    """Chunks of a phase that goes by tokens."""
    return int(job.num_tokens + TOKENS_A_CHUNK - 1) // TOKENS_A_CHUNK


@compiled
def prepare_row(matrix: Any, x: int, prepared: int, t: int) -> None:
    """Prepare one row for a matrix as its token t."""
    call_native3(matrix.prepare, x, prepared + t * matrix.prepared_bytes, matrix.cols)


@compiled
def num_block_chunks(matrix: Any) -> int:
    """Chunks of a phase that goes by blocks of rows of a matrix."""
    size = blocks_per_chunk(matrix)
    return int(matrix.num_blocks + size - 1) // size


@compiled
def multiply_chunk(matrix: Any, chunk: int, xs: int, rows: int, num_tokens: int) -> None:
    """One chunk of the blocks of a matrix, for all tokens."""
    size = blocks_per_chunk(matrix)
    multiply_blocks(matrix, chunk * size, min(matrix.num_blocks, (chunk + 1) * size), xs, rows, num_tokens)


@compiled
def add_product_chunk(job: Any, matrix: Any, chunk: int, xs: int) -> None:
    """x += one chunk of the rows of a stage's last matrix, for all tokens."""
    multiply_chunk(matrix, chunk, xs, job.out_rows, job.num_tokens)
    rows = blocks_per_chunk(matrix) * 16
    first, last = chunk * rows, min(job.hidden, (chunk + 1) * rows)
    for t in range(job.num_tokens):
        add_row(job.x + (t * job.hidden + first) * 4, job.out + t * job.out_stride + first * 4, last - first)


@compiled
def partial_address(job: Any, item: int, split: int) -> int:
    """Where the partial result of one split of an item is kept for its merging."""
    return int(job.partials + (item * job.num_splits + split) * job.partial_bytes)
