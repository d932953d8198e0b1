"""The gated delta net in plain numpy, row by row: what `delta_net` computes, for tests and for reading.

Sums are float64; what is stored between rows, states and tails, is float32.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.delta_inputs import TILE_VALUES, DeltaNetWeights, DeltaStates
from colibri_mp.kernels.reference_attention import F32Array, F64Array, linear, rms_norm
from colibri_mp.specs import QK_EPS, DeltaNetSpec


def delta_net(
    x: F32Array, weights: DeltaNetWeights, spec: DeltaNetSpec, states: DeltaStates, layer_idx: int, batch: Batch
) -> None:
    """x += delta_net(norm(x)) in place; advances the states of the batch's runs. As `delta_net.DeltaNetStage`."""
    h = rms_norm(x, weights.norm, spec.norm_eps)
    qkv, z, b, a = (linear(h, matrix) for matrix in (weights.qkv, weights.z, weights.b, weights.a))
    result = np.empty((len(x), spec.value_width), np.float32)
    for first, count, source, target in batch.state_runs.tolist():
        state, tail = read_state(states, layer_idx, source), np.zeros((spec.conv_tokens - 1, spec.conv_width))
        if source >= 0:
            tail = states.tails[layer_idx, source].astype(float)
        for t in range(first, first + count):
            inputs = np.concatenate([tail, qkv[t : t + 1]])
            tail = inputs[1:]
            q, k, v = split_heads(silu((inputs * weights.conv).sum(axis=0)), spec)
            decay = np.exp(weights.rate * np.logaddexp(0, a[t].astype(float) + weights.dt_bias))
            out, state = advance(state, q, k, v, decay, 1 / (1 + np.exp(-b[t].astype(float))))
            normed = out / np.sqrt((out * out).mean(axis=-1, keepdims=True) + spec.norm_eps) * weights.head_norm
            result[t] = normed.reshape(-1) * silu(z[t].astype(float))
        write_state(states, layer_idx, target, state)
        states.tails[layer_idx, target] = tail
    x += linear(result, weights.out)


def split_heads(row: F64Array, spec: DeltaNetSpec) -> tuple[F64Array, F64Array, F64Array]:
    """q and k [value heads, key_dim], of length 1 (q times key_dim^-0.5), repeated for the heads of a group; v [value heads, value_dim]."""
    q, k, v = np.split(row, [spec.key_width, 2 * spec.key_width])
    q, k = (heads.reshape(spec.num_key_heads, spec.key_dim) for heads in (q, k))
    q, k = (heads / np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + QK_EPS) for heads in (q, k))
    q, k = (heads.repeat(spec.group_size, axis=0) for heads in (q * spec.key_dim**-0.5, k))
    return q, k, v.reshape(spec.num_value_heads, spec.value_dim)


def advance(
    state: F64Array, q: F64Array, k: F64Array, v: F64Array, decay: F64Array, beta: F64Array
) -> tuple[F64Array, F64Array]:
    """One token through the states [value heads, key_dim, value_dim]: what comes out [value heads, value_dim], and the states after it."""
    state = state * decay[:, None, None]
    delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * delta[:, None, :]
    return np.einsum("hkv,hk->hv", state, q), state


def silu(x: F64Array) -> F64Array:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def read_state(states: DeltaStates, layer_idx: int, slot: int) -> F64Array:
    """The state in a slot, float64 [value heads, key_dim, value_dim]; zeros for a slot below 0."""
    spec = states.spec
    if slot < 0:
        return np.zeros((spec.num_value_heads, spec.key_dim, spec.value_dim))
    tiles = states.states[layer_idx, slot].astype(float)
    wide = tiles.transpose(0, 2, 1, 3).reshape(spec.num_value_heads, spec.key_dim, -1)
    return np.asarray(wide[:, :, : spec.value_dim])


def write_state(states: DeltaStates, layer_idx: int, slot: int, state: NDArray[np.float64]) -> None:
    """The inverse of `read_state`; zeros where a tile is wider than the heads are."""
    spec = states.spec
    padding = -spec.value_dim % TILE_VALUES
    wide = np.pad(state, ((0, 0), (0, 0), (0, padding))).astype(np.float32)
    tiles = wide.reshape(spec.num_value_heads, spec.key_dim, -1, TILE_VALUES)
    states.states[layer_idx, slot] = tiles.transpose(0, 2, 1, 3)
