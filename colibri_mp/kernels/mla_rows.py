"""What happens to one token's rows in latent attention between the projections and the scores, in compiled code."""

from typing import Any

import numpy as np

from colibri_mp.kernels.attention_rows import inverse_scale, largest_of, turn_head
from colibri_mp.kernels.attention_tiles8 import set_code
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.mla_tiles import PART_BYTES
from colibri_mp.kernels.norm import load_up_to16, store_up_to16
from colibri_mp.kernels.vectors import fma16, get_f32, get_i32, set_f32, splat16, store16, sum16

_NOTHING = np.float32(0.0)


@compiled
def turn(job: Any, head: int, position: int, scratch: int) -> None:
    """Rotary embedding of `2 * job.rotary_half` elements in place. Where neighbours are pairs, the first ones of all come first after it.

    Scores are sums over the elements, so the order matters only in that queries and keys agree.
    """
    half, angles = job.rotary_half, position * job.rotary_half * 4
    if job.interleaved != 0:
        for i in range(half):
            set_f32(scratch + 4 * i, get_f32(head + 8 * i))
            set_f32(scratch + 4 * (half + i), get_f32(head + 8 * i + 4))
        for i in range(0, 2 * half, 16):
            store_up_to16(head + 4 * i, load_up_to16(scratch + 4 * i, 2 * half - i), 2 * half - i)
    turn_head(head, job.cos + angles, job.sin + angles, half)


@compiled
def scale_row(row: int, width: int, factor: np.float32) -> None:
    """row *= factor."""
    for i in range(0, width, 16):
        store_up_to16(row + 4 * i, load_up_to16(row + 4 * i, width - i) * splat16(factor), width - i)


@compiled
def multiply_rows(a: int, b: int, out: int, width: int) -> None:
    """out = a * b, element by element."""
    for i in range(0, width, 16):
        product = load_up_to16(a + 4 * i, width - i) * load_up_to16(b + 4 * i, width - i)
        store_up_to16(out + 4 * i, product, width - i)


@compiled
def dot_rows(a: int, b: int, width: int) -> np.float32:
    """Sum of products in 16 lanes, then over the lanes as a tree."""
    total = splat16(_NOTHING)
    for i in range(0, width, 16):
        total = fma16(load_up_to16(a + 4 * i, width - i), load_up_to16(b + 4 * i, width - i), total)
    return sum16(total)  # type: ignore[no-any-return]  # compiled code


@compiled
def add_constant(row: int, width: int, addend: np.float32) -> None:
    """row += addend; width a multiple of 16."""
    for i in range(0, width, 16):
        store16(row + 4 * i, load_up_to16(row + 4 * i, 16) + splat16(addend))


@compiled
def store_latent(job: Any, t: int, position: int, row: int) -> None:
    """A token's latent and rope key, one after the other in `row`, to its place in the cache (layout: `latent_cache`)."""
    lane = position % 16
    block = get_i32(job.block_table + (get_i32(job.sequences + 4 * t) * job.max_blocks + position // 16) * 4)
    tile = job.kv_layer + block * job.tile_bytes
    if job.kv_bits == 8:
        scales = tile + job.key_width * 16
        _store_codes(tile, lane, row, 0, job.latent_dim, scales)
        _store_codes(tile, lane, row, job.latent_dim, job.latent_dim + job.rope_dim, scales + 64)
        for i in range(job.latent_dim + job.rope_dim, job.key_width):
            set_code(tile + (i // 16 * 16 + lane) * 16 + i % 16, _NOTHING)
        return
    width = job.latent_dim + job.rope_dim
    for i in range(0, job.key_width, 16):
        store16(tile + i // 16 * PART_BYTES + lane * 64, load_up_to16(row + 4 * i, width - i))


@compiled
def _store_codes(tile: int, lane: int, row: int, first: int, last: int, scales: int) -> None:
    """The elements first .. last - 1 of a row, with a scale of their own."""
    largest = largest_of(row + 4 * first, last - first)
    inverse = inverse_scale(largest)
    for i in range(first, last):
        set_code(tile + (i // 16 * 16 + lane) * 16 + i % 16, get_f32(row + 4 * i) * inverse)
    set_f32(scales + 4 * lane, largest / np.float32(127.0))
