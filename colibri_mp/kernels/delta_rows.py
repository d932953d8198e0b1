"""The recurrence of the gated delta net for one key head and its value heads, in compiled code.

For each row in the order of the sequence (transformers' `torch_recurrent_gated_delta_rule`; S [key_dim, value_dim] of a value head):

    q, k, v = silu(conv(last rows of the projections));  q = q / |q| * key_dim^-0.5;  k = k / |k|
    decay = exp(rate * softplus(a + dt_bias));  beta = sigmoid(b)
    d = beta * (v - decay * S^T k);  S = decay * S + k d^T;  o = S^T q
    o = norm(o) * head_norm * silu(z)

Rows are taken in blocks, and within a block each tile of S meets all rows before the next tile does: a tile stays in the first-level cache.
What is computed for a row, and in which order, depends on the rows before it in its sequence alone.

`job` is the record of `delta_stage.FRAME`; layouts of states and tails: `delta_inputs`.
"""

import math
from typing import Any

import numpy as np

from colibri_mp.kernels.delta_inputs import TILE_VALUES
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.norm import rms_norm_row
from colibri_mp.kernels.vectors import (
    copy_bytes,
    exp16,
    fma16,
    get_f32,
    load16,
    set_f32,
    splat16,
    store16,
    sum16,
)
from colibri_mp.specs import QK_EPS

BLOCK_ROWS = 16
"""Rows that are taken through a tile together."""

_TILE_ROW_BYTES = 4 * TILE_VALUES
_EPS = np.float32(QK_EPS)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LINEAR_FROM = 20.0  # softplus(x) is x from here on, as in torch


@compiled
def start_run(job: Any, key_head: int, source: int, target: int) -> None:
    """Bring the state of a key head's value heads to the slot where the run goes on; `source` below 0: it begins with zeros."""
    heads_bytes = job.group_size * job.head_bytes
    place = _state(job, key_head * job.group_size, target)
    if source < 0:
        for i in range(0, heads_bytes, 64):
            store16(place + i, splat16(_ZERO))
    elif source != target:
        copy_bytes(_state(job, key_head * job.group_size, source), place, heads_bytes)
    for part in range(3):
        offset, num_bytes = _channels(job, key_head, part)
        for row in range(job.conv_tokens - 1):
            tail = _tail_row(job, target, row) + offset
            if source < 0:
                for i in range(0, num_bytes, 64):
                    store16(tail + i, splat16(_ZERO))
            elif source != target:
                copy_bytes(_tail_row(job, source, row) + offset, tail, num_bytes)


@compiled
def end_run(job: Any, key_head: int, first: int, count: int, slot: int) -> None:
    """Keep the last inputs of the convolution for the rows to come."""
    num_kept = job.conv_tokens - 1
    for part in range(3):
        offset, num_bytes = _channels(job, key_head, part)
        for row in range(num_kept):
            source = _input_row(job, first, first + count - num_kept + row, slot) + offset
            copy_bytes(source, _tail_row(job, slot, row) + offset, num_bytes)


@compiled
def advance_rows(job: Any, key_head: int, first: int, begin: int, end: int, slot: int, scratch: int) -> None:
    """Rows begin..end, at most BLOCK_ROWS, of a run that starts with row `first`; what comes out takes the place of their z."""
    q, k, v = scratch + job.q_offset, scratch + job.k_offset, scratch + job.v_offset
    for t in range(begin, end):
        _make_inputs(job, key_head, first, t, t - begin, slot, q, k, v)
    decays, betas, out = scratch + job.decay_offset, scratch + job.beta_offset, scratch + job.head_offset
    for member in range(job.group_size):
        head = key_head * job.group_size + member
        for t in range(begin, end):
            _make_gates(job, head, t, decays + 4 * (t - begin), betas + 4 * (t - begin))
        values = v + member * BLOCK_ROWS * job.tile_row_bytes
        state = _state(job, head, slot)
        for tile in range(job.num_tiles):
            for row in range(end - begin):
                moved = row * job.tile_row_bytes + tile * _TILE_ROW_BYTES
                keys = row * job.key_dim * 4
                decay, beta = get_f32(decays + 4 * row), get_f32(betas + 4 * row)
                place = state + tile * job.key_dim * _TILE_ROW_BYTES
                _advance_tile(place, k + keys, q + keys, values + moved, out + moved, decay, beta, job.key_dim)
        for t in range(begin, end):
            z = job.z + t * job.z_stride + head * job.value_dim * 4
            _finish_head(job, out + (t - begin) * job.tile_row_bytes, z)


@compiled
def _state(job: Any, head: int, slot: int) -> int:
    return int(job.states + slot * job.slot_bytes + head * job.head_bytes)


@compiled
def _tail_row(job: Any, slot: int, row: int) -> int:
    return int(job.tails + (slot * (job.conv_tokens - 1) + row) * job.conv_bytes)


@compiled
def _channels(job: Any, key_head: int, part: int) -> tuple[int, int]:
    """Offset and bytes of a key head's channels among those of q, k and v (part 0, 1, 2)."""
    if part < 2:
        return (part * job.num_key_heads + key_head) * job.key_dim * 4, job.key_dim * 4
    group_bytes = job.group_size * job.value_dim * 4
    return 2 * job.num_key_heads * job.key_dim * 4 + key_head * group_bytes, group_bytes


@compiled
def _input_row(job: Any, first: int, t: int, slot: int) -> int:
    """What the convolution was given for row t: before the run's first row it is in the tail."""
    if t >= first:
        return int(job.qkv + t * job.qkv_stride)
    return _tail_row(job, slot, t - first + job.conv_tokens - 1)


@compiled
def _make_inputs(job: Any, key_head: int, first: int, t: int, row: int, slot: int, q: int, k: int, v: int) -> None:
    """q, k and v of one row, after convolution and activation, to their places in the scratch."""
    offset, _ = _channels(job, key_head, 0)
    place = q + row * job.key_dim * 4
    _convolve(job, first, t, slot, offset, job.key_dim, place)
    _divide_by_length(place, job.key_dim, np.float32(job.scale))
    offset, _ = _channels(job, key_head, 1)
    place = k + row * job.key_dim * 4
    _convolve(job, first, t, slot, offset, job.key_dim, place)
    _divide_by_length(place, job.key_dim, _ONE)
    offset, _ = _channels(job, key_head, 2)
    for member in range(job.group_size):
        place = v + (member * BLOCK_ROWS + row) * job.tile_row_bytes
        _convolve(job, first, t, slot, offset + member * job.value_dim * 4, job.value_dim, place)
        if job.value_dim * 4 < job.tile_row_bytes:
            store16(place + job.value_dim * 4, splat16(_ZERO))


@compiled
def _convolve(job: Any, first: int, t: int, slot: int, offset: int, width: int, out: int) -> None:
    """silu of the sum over taps of weight * input, of `width` channels from byte `offset` on."""
    for i in range(offset, offset + 4 * width, 64):
        total = splat16(_ZERO)
        for tap in range(job.conv_tokens):
            row = _input_row(job, first, t - job.conv_tokens + 1 + tap, slot)
            total = fma16(load16(row + i), load16(job.conv + tap * job.conv_bytes + i), total)
        store16(out + i - offset, _silu(total))


@compiled
def _silu(x: Any) -> Any:
    return x / (splat16(_ONE) + exp16(splat16(_ZERO) - x))


@compiled
def _divide_by_length(row: int, width: int, scale: np.float32) -> None:
    squares = splat16(_ZERO)
    for i in range(0, 4 * width, 64):
        part = load16(row + i)
        squares = fma16(part, part, squares)
    factor = splat16(scale / np.sqrt(sum16(squares) + _EPS))
    for i in range(0, 4 * width, 64):
        store16(row + i, load16(row + i) * factor)


@compiled
def _make_gates(job: Any, head: int, t: int, decay: int, beta: int) -> None:
    """What is kept of the old state, and how much of the new is taken in."""
    x = float(get_f32(job.a + t * job.gate_stride + 4 * head) + get_f32(job.dt_bias + 4 * head))
    softplus = x if x > _LINEAR_FROM else math.log1p(math.exp(x))
    set_f32(decay, np.float32(math.exp(get_f32(job.rate + 4 * head) * softplus)))
    b = float(get_f32(job.b + t * job.gate_stride + 4 * head))
    set_f32(beta, np.float32(1.0 / (1.0 + math.exp(-b))))


@compiled
def _advance_tile(
    state: int, k: int, q: int, v: int, out: int, decay: np.float32, beta: np.float32, key_dim: int
) -> None:
    """One row through one tile; even and odd elements of k and q have sums of their own, so that none waits for another."""
    even0, even1, odd0, odd1 = splat16(_ZERO), splat16(_ZERO), splat16(_ZERO), splat16(_ZERO)
    for i in range(0, key_dim, 2):
        at = state + i * _TILE_ROW_BYTES
        even, odd = splat16(get_f32(k + 4 * i)), splat16(get_f32(k + 4 * i + 4))
        even0, even1 = fma16(load16(at), even, even0), fma16(load16(at + 64), even, even1)
        odd0, odd1 = fma16(load16(at + 128), odd, odd0), fma16(load16(at + 192), odd, odd1)
    kept, taken = splat16(decay), splat16(beta)
    delta0 = (load16(v) - (even0 + odd0) * kept) * taken
    delta1 = (load16(v + 64) - (even1 + odd1) * kept) * taken
    even0, even1, odd0, odd1 = splat16(_ZERO), splat16(_ZERO), splat16(_ZERO), splat16(_ZERO)
    for i in range(0, key_dim, 2):
        at = state + i * _TILE_ROW_BYTES
        even, odd = splat16(get_f32(k + 4 * i)), splat16(get_f32(k + 4 * i + 4))
        s0, s1 = fma16(even, delta0, load16(at) * kept), fma16(even, delta1, load16(at + 64) * kept)
        s2, s3 = fma16(odd, delta0, load16(at + 128) * kept), fma16(odd, delta1, load16(at + 192) * kept)
        store16(at, s0)
        store16(at + 64, s1)
        store16(at + 128, s2)
        store16(at + 192, s3)
        even, odd = splat16(get_f32(q + 4 * i)), splat16(get_f32(q + 4 * i + 4))
        even0, even1 = fma16(s0, even, even0), fma16(s1, even, even1)
        odd0, odd1 = fma16(s2, odd, odd0), fma16(s3, odd, odd1)
    store16(out, even0 + odd0)
    store16(out + 64, even1 + odd1)


@compiled
def _finish_head(job: Any, out: int, z: int) -> None:
    """z = norm(out) * silu(z)."""
    rms_norm_row(out, job.head_norm, out, job.value_dim, np.float32(job.eps))
    for i in range(0, 4 * job.value_dim, 64):
        store16(z + i, load16(out + i) * _silu(load16(z + i)))
