"""What happens to one token's index keys and queries between their projections and the scores, in compiled code."""

from typing import Any

import numpy as np

from colibri_mp.kernels.index_tiles import WIDTH
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.norm import load_up_to16, store_up_to16
from colibri_mp.kernels.vectors import fma16, get_f32, get_i32, set_f32, splat16, sum16

_NOTHING = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def layer_norm_row(row: int, weight: int, bias: int, width: int, eps: np.float32) -> None:
    """(x - mean) * (variance + eps)^-0.5 * weight + bias in place, float32 (arXiv 1607.06450)."""
    total = splat16(_NOTHING)
    for i in range(0, width, 16):
        total = total + load_up_to16(row + 4 * i, width - i)
    mean = splat16(sum16(total) / np.float32(width))
    squares = splat16(_NOTHING)
    for i in range(0, width, 16):
        store_up_to16(row + 4 * i, load_up_to16(row + 4 * i, width - i) - mean, width - i)
        part = load_up_to16(row + 4 * i, width - i)
        squares = fma16(part, part, squares)
    factor = splat16(_ONE / np.sqrt(sum16(squares) / np.float32(width) + eps))
    for i in range(0, width, 16):
        part = load_up_to16(row + 4 * i, width - i) * factor * load_up_to16(weight + 4 * i, width - i)
        store_up_to16(row + 4 * i, part + load_up_to16(bias + 4 * i, width - i), width - i)


@compiled
def turn_pairs(head: int, cos: int, sin: int, half: int, interleaved: int) -> None:
    """Rotary embedding of one head in place; pair i is the elements 2i, 2i + 1 if `interleaved`, else i, i + half."""
    second, step = (4, 8) if interleaved != 0 else (4 * half, 4)
    for i in range(half):
        a_place = head + i * step
        a, b = get_f32(a_place), get_f32(a_place + second)
        c, s = get_f32(cos + 4 * i), get_f32(sin + 4 * i)
        set_f32(a_place, a * c - b * s)
        set_f32(a_place + second, b * c + a * s)


@compiled
def finish_key(job: Any, t: int, position: int) -> None:
    """Norm and turn the key of a token, and store it in its block."""
    key = job.k + t * job.k_stride
    layer_norm_row(key, job.k_norm, job.k_bias, job.head_dim, np.float32(job.eps))
    angles = position * job.rotary_half * 4
    turn_pairs(key, job.cos + angles, job.sin + angles, job.rotary_half, job.interleaved)
    tile = tile_address(job, get_i32(job.sequences + 4 * t), position // 16) + position % 16 * 4
    for d in range(job.head_dim):
        set_f32(tile + d * 64, get_f32(key + 4 * d))


@compiled
def finish_queries(job: Any, t: int, position: int) -> None:
    """Turn all heads of a token."""
    angles = position * job.rotary_half * 4
    for head in range(job.num_heads):
        query = job.q + t * job.q_stride + head * job.head_dim * 4
        turn_pairs(query, job.cos + angles, job.sin + angles, job.rotary_half, job.interleaved)


@compiled
def tile_address(job: Any, sequence: int, tile: int) -> int:
    """Address of the keys of 16 positions of a sequence."""
    block = get_i32(job.block_table + (sequence * job.max_blocks + tile) * 4)
    return int(job.keys + block * job.tile_bytes)


@compiled
def pack_heads(job: Any, t: int, packed: int) -> None:
    """Copy a token's queries to groups [head_dim][WIDTH]; zeros where the last group is not full."""
    for head in range(job.num_groups * WIDTH):
        source = job.q + t * job.q_stride + head * job.head_dim * 4
        target = packed + (head // WIDTH * job.head_dim * WIDTH + head % WIDTH) * 4
        for d in range(job.head_dim):
            set_f32(target + d * WIDTH * 4, get_f32(source + 4 * d) if head < job.num_heads else _NOTHING)
