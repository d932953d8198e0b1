"""The gated delta net of one layer through MLX, token by token; the rules are those of `kernels.delta_net`.

    q, k, v = silu(convolution over the last tokens of qkv norm(x)); q and k of length 1
    for each token:   S = decay S;   S += k (beta (v - S^T k))^T;   out = S^T q
    x + out projection(head norm(out) * silu(z norm(x)))

What a run of rows continues and where its state goes is in `Batch.state_runs`. A state is float32 [value heads, key_dim, value_dim].
"""

import mlx.core as mx

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray
from colibri_mp.mlx_backend.mixer import Room, WeightReader
from colibri_mp.mlx_backend.rows import Rope, rms_norm
from colibri_mp.models.structure import DeltaNetTensors
from colibri_mp.specs import QK_EPS, DeltaNetSpec

TOKENS_AT_ONCE = 32
"""Tokens whose operations are handed to MLX together."""


class DeltaNet:
    """The delta net of a layer, with its weights and states."""

    def __init__(
        self, reader: WeightReader, spec: DeltaNetSpec, tensors: DeltaNetTensors, _rope: Rope, room: Room
    ) -> None:
        self._spec = spec
        self._norm, self._head_norm = reader.vector(tensors.norm), reader.vector(tensors.head_norm)
        self._qkv, self._z, self._b, self._a, self._out = map(reader.matrix, tensors.matrices)
        self._conv = reader.vector(tensors.conv).reshape(spec.conv_width, spec.conv_tokens).T
        self._rate, self._dt_bias = -mx.exp(reader.vector(tensors.a_log)), reader.vector(tensors.dt_bias)
        mx.eval(self._conv, self._rate)
        self._states = SlotArray(room.num_state_slots, (spec.num_value_heads, spec.key_dim, spec.value_dim))
        self._tails = SlotArray(room.num_state_slots, (spec.conv_tokens - 1, spec.conv_width))
        self.paged: tuple[PagedArray, ...] = ()
        self.states: tuple[SlotArray, ...] = (self._states, self._tails)

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x [T, D] -> x + delta_net(norm(x)); advances the states of the batch's runs."""
        spec = self._spec
        h = rms_norm(x, self._norm, spec.norm_eps)
        qkv, beta = self._qkv(h), mx.sigmoid(self._b(h))
        decay = mx.exp(self._rate * mx.logaddexp(self._a(h) + self._dt_bias, mx.array(0.0)))
        parts = []
        for first, count, source, target in batch.state_runs.tolist():
            rows = slice(first, first + count)
            parts.append(self._run(qkv[rows], decay[rows], beta[rows], source, target))
        heads = rms_norm(mx.concatenate(parts), self._head_norm, spec.norm_eps)
        z = self._z(h)
        return x + self._out(heads.reshape(len(x), -1) * (z * mx.sigmoid(z)))

    def _run(self, qkv: mx.array, decay: mx.array, beta: mx.array, source: int, target: int) -> mx.array:
        """What comes out of the state for some rows of one sequence [n, value heads, value_dim]."""
        inputs = mx.concatenate([self._tails.read(source), qkv])
        q, k, v = self._heads(inputs, len(qkv))
        state, results = self._states.read(source), []
        for t in range(len(qkv)):
            state = state * decay[t][:, None, None]
            delta = beta[t][:, None] * (v[t] - (state * k[t][:, :, None]).sum(axis=1))
            state = state + k[t][:, :, None] * delta[:, None]
            results.append((state * q[t][:, :, None]).sum(axis=1))
            if t % TOKENS_AT_ONCE == TOKENS_AT_ONCE - 1:
                mx.eval(state, results)
        self._states.write(target, state)
        self._tails.write(target, inputs[len(qkv) :])
        return mx.stack(results)

    def _heads(self, inputs: mx.array, num_rows: int) -> tuple[mx.array, mx.array, mx.array]:
        """q and k [n, value heads, key_dim], repeated for the heads of a group, and v [n, value heads, value_dim]."""
        spec = self._spec
        mixed = sum(
            (inputs[j : j + num_rows] * self._conv[j] for j in range(1, spec.conv_tokens)),
            inputs[:num_rows] * self._conv[0],
        )
        rows = mixed * mx.sigmoid(mixed)
        q, k = (
            rows[:, start : start + spec.key_width].reshape(num_rows, spec.num_key_heads, spec.key_dim)
            for start in (0, spec.key_width)
        )
        q, k = (heads * mx.rsqrt((heads * heads).sum(axis=-1, keepdims=True) + QK_EPS) for heads in (q, k))
        q, k = (mx.repeat(heads, spec.group_size, axis=1) for heads in (q * spec.key_dim**-0.5, k))
        return q, k, rows[:, 2 * spec.key_width :].reshape(num_rows, spec.num_value_heads, spec.value_dim)


def kv_bytes(_spec: DeltaNetSpec, _num_tokens: int) -> int:
    """Nothing of it grows with positions."""
    return 0


def scratch_bytes(spec: DeltaNetSpec, max_rows: int, _max_context: int) -> int:
    """Bytes that a layer takes while it computes, at most: rows on their way, states between two tokens."""
    rows = 4 * max_rows * (3 * spec.hidden + 5 * spec.conv_width + 4 * spec.value_width)
    return rows + 4 * 4 * TOKENS_AT_ONCE * spec.num_value_heads * spec.key_dim * spec.value_dim
