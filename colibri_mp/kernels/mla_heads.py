"""What latent attention does head by head: W_uk before and W_uv after the attention, for some tokens at a time, in compiled code."""

from typing import Any

import numpy as np

from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.linear import multiply_blocks
from colibri_mp.kernels.mla_rows import add_constant, dot_rows, multiply_rows, scale_row, turn
from colibri_mp.kernels.vectors import call_native3, copy_bytes, get_i32, set_i64

TOKENS_A_PASS = 64
"""Tokens that go through a head's matrix together."""


@compiled
def absorb(job: Any, head: int, first: int, last: int, scratch: int) -> None:
    """Finish one head's queries of some tokens, and multiply their nope parts with its W_uk, a group of output columns at a time."""
    width, qk_bytes = job.latent_dim // job.num_scales, (job.nope_dim + job.rope_dim) * 4
    for t in range(first, last):
        query = job.q + t * job.q_stride + head * qk_bytes
        scale_row(query, job.nope_dim + job.rope_dim, np.float32(job.scale))
        turn(job, query + job.nope_dim * 4, get_i32(job.positions + 4 * t), scratch)
    row, table = scratch + job.row_offset, scratch + job.table_offset
    for group in range(job.num_scales):
        factors = (head * job.num_scales + group) * job.nope_dim * 4
        for t in range(first, last):
            query, prepared = (
                job.q + t * job.q_stride + head * qk_bytes,
                scratch + (t - first) * job.uk_matrix.prepared_bytes,
            )
            if job.uk_scales != 0:
                multiply_rows(query, job.uk_scales + factors, row, job.nope_dim)
                query = row
            call_native3(job.uk_matrix.prepare, query, prepared, job.uk_matrix.cols)
            set_i64(table + 8 * (t - first), prepared)
        block = (head * job.latent_dim + group * width) // 16
        multiply_blocks(job.uk_matrix, block, block + width // 16, table, job.latents_rows + 8 * first, last - first)
        if job.uk_biases != 0:
            for t in range(first, last):
                query = job.q + t * job.q_stride + head * qk_bytes
                addend = dot_rows(query, job.uk_biases + factors, job.nope_dim)
                add_constant(job.latents + t * job.latents_stride + block * 64, width, addend)


@compiled
def unfold(job: Any, head: int, first: int, last: int, scratch: int) -> None:
    """W_uv of one head times its latents of some tokens; the context takes the queries' place."""
    table, latent = scratch + job.table_offset, job.latents + head * job.latent_dim * 4
    for t in range(first, last):
        prepared = scratch + (t - first) * job.uv_matrix.prepared_bytes
        call_native3(job.uv_matrix.prepare, latent + t * job.latents_stride, prepared, job.uv_matrix.cols)
        set_i64(table + 8 * (t - first), prepared)
    blocks = job.v_padded // 16
    multiply_blocks(job.uv_matrix, head * blocks, (head + 1) * blocks, table, job.q_rows + 8 * first, last - first)


@compiled
def close_gaps(job: Any, context: int) -> None:
    """[heads][v_padded] -> [heads][v_dim], in place; a head at a time, which may overlap its own new place only when it goes first."""
    for head in range(1, job.num_heads):
        for i in range(job.v_dim):
            copy_bytes(context + (head * job.v_padded + i) * 4, context + (head * job.v_dim + i) * 4, 4)
