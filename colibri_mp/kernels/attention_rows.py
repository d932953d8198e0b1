"""What happens to one token's q, k and v rows between the projections and the scores, in compiled code."""

from typing import Any

import numpy as np

from colibri_mp.kernels.attention_tiles8 import set_code
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.norm import load_up_to16, rms_norm_row, store_up_to16
from colibri_mp.kernels.vectors import (
    abs16,
    exp16,
    get_f32,
    get_i32,
    largest16,
    max16,
    min16,
    set_f32,
    splat16,
    store16,
)

NORM_NONE, NORM_HEAD, NORM_FULL = 0, 1, 2
"""`job.qk_norm`"""


@compiled
def finish_projection(
    job: Any, row: int, bias: int, norm: int, num_heads: int, position: int, scale: np.float32
) -> None:
    """Bias, norm, clip, rotary embedding and scale of all heads of q or k of one token, in place."""
    width = num_heads * job.head_dim
    add_row(row, bias, width)
    if job.qk_norm == NORM_FULL:
        rms_norm_row(row, norm, row, width, np.float32(job.eps))
    elif job.qk_norm == NORM_HEAD:
        for head in range(num_heads):
            place = row + head * job.head_dim * 4
            rms_norm_row(place, norm, place, job.head_dim, np.float32(job.eps))
    clip_row(row, width, np.float32(job.clip))
    angles = position * job.rotary_half * 4
    for head in range(num_heads):
        turn_head(row + head * job.head_dim * 4, job.cos + angles, job.sin + angles, job.rotary_half)
    if scale != np.float32(1.0):
        for i in range(0, width, 16):
            store_up_to16(row + 4 * i, load_up_to16(row + 4 * i, width - i) * splat16(scale), width - i)


@compiled
def add_row(row: int, addend: int, width: int) -> None:
    """row += addend, unless that is 0."""
    if addend != 0:
        for i in range(0, width, 16):
            total = load_up_to16(row + 4 * i, width - i) + load_up_to16(addend + 4 * i, width - i)
            store_up_to16(row + 4 * i, total, width - i)


@compiled
def clip_row(row: int, width: int, limit: np.float32) -> None:
    """Clamp to [-limit, limit], unless that is 0."""
    if limit > np.float32(0.0):
        for i in range(0, width, 16):
            part = load_up_to16(row + 4 * i, width - i)
            store_up_to16(row + 4 * i, max16(min16(part, splat16(limit)), splat16(-limit)), width - i)


@compiled
def gate_row(row: int, gate: int, width: int) -> None:
    """row *= sigmoid(gate)."""
    one, zero = splat16(np.float32(1.0)), splat16(np.float32(0.0))
    for i in range(0, width, 16):
        share = one / (one + exp16(zero - load_up_to16(gate + 4 * i, width - i)))
        store_up_to16(row + 4 * i, load_up_to16(row + 4 * i, width - i) * share, width - i)


@compiled
def turn_head(head: int, cos: int, sin: int, half: int) -> None:
    """Elements i and i + half turn by the angle of pair i."""
    for i in range(0, half, 16):
        first, second = head + 4 * i, head + 4 * (half + i)
        a, b = load_up_to16(first, half - i), load_up_to16(second, half - i)
        c, s = load_up_to16(cos + 4 * i, half - i), load_up_to16(sin + 4 * i, half - i)
        store_up_to16(first, a * c - b * s, half - i)
        store_up_to16(second, b * c + a * s, half - i)


@compiled
def store_in_cache(job: Any, t: int, position: int, k: int, v: int) -> None:
    """Scatter a token's keys and values to their tiles (layout: `kv_cache`, `kv_cache8`)."""
    lane = position % 16
    block = get_i32(job.block_table + (get_i32(job.sequences + 4 * t) * job.max_blocks + position // 16) * 4)
    for head in range(job.num_kv_heads):
        tile = job.kv_layer + (block * job.num_kv_heads + head) * job.tile_bytes
        key, value = k + head * job.head_dim * 4, v + head * job.head_dim * 4
        if job.kv_bits == 8:
            _store_codes(job, tile, lane, key, value)
        else:
            _store_floats(job, tile, lane, key, value)


@compiled
def _store_floats(job: Any, tile: int, lane: int, key: int, value: int) -> None:
    for d in range(job.head_dim):
        set_f32(tile + (d * 16 + lane) * 4, get_f32(key + d * 4))
    for d in range(0, job.head_dim, 16):
        store16(tile + job.values_offset + (d + lane) * 64, load_up_to16(value + d * 4, job.head_dim - d))


@compiled
def _store_codes(job: Any, tile: int, lane: int, key: int, value: int) -> None:
    largest = largest_of(key, job.head_dim)
    inverse = inverse_scale(largest)
    for d in range(job.head_dim):
        set_code(tile + d * 16 + lane, get_f32(key + d * 4) * inverse)
    set_f32(tile + job.head_dim * 16 + lane * 4, largest / np.float32(127.0))
    values = tile + job.values_offset
    largest = largest_of(value, job.head_dim)
    inverse = inverse_scale(largest)
    for d in range(job.head_dim):
        set_code(values + (d // 16 * 16 + lane) * 16 + d % 16, get_f32(value + d * 4) * inverse)
    set_f32(values + job.value_parts * job.part_bytes + lane * 4, largest / np.float32(127.0))


@compiled
def largest_of(row: int, width: int) -> np.float32:
    """The greatest absolute value."""
    largest = splat16(np.float32(0.0))
    for i in range(0, width, 16):
        largest = max16(largest, abs16(load_up_to16(row + 4 * i, width - i)))
    return largest16(largest)  # type: ignore[no-any-return]  # compiled code


@compiled
def inverse_scale(largest: np.float32) -> np.float32:
    return np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
