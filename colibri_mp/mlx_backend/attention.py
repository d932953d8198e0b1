"""Grouped-query attention of one layer through MLX; the rules are those of `kernels.attention`.

    q, k, v = projections of norm(x), with biases, norms and clipping; q and k turned
    keys and values of the rows go into the paged cache; for each sequence of the step:
        softmax(q K^T * scale, causal and windowed, with the heads' sinks) V
    x + o(context), which a gate may have multiplied

A sequence's rows are taken some at a time, so that their scores stay below `SCORES_BYTES`.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray, paged_bytes
from colibri_mp.mlx_backend.mixer import Room, WeightReader
from colibri_mp.mlx_backend.rows import Rope, Run, blocks_of, rms_norm, runs
from colibri_mp.models.structure import AttentionTensors
from colibri_mp.specs import AttentionSpec

SCORES_BYTES = 16 << 20


class Attention:
    """The attention block of a layer, with its weights and its keys and values."""

    def __init__(
        self, reader: WeightReader, spec: AttentionSpec, tensors: AttentionTensors, rope: Rope, room: Room
    ) -> None:
        self._spec, self._rope = spec, rope
        self._norm = reader.vector(tensors.norm)
        self._q, self._k, self._v, self._o = map(reader.matrix, tensors.matrices)
        self._q_bias, self._k_bias = reader.optional(tensors.q_bias), reader.optional(tensors.k_bias)
        self._v_bias, self._o_bias = reader.optional(tensors.v_bias), reader.optional(tensors.o_bias)
        self._q_norm, self._k_norm = reader.optional(tensors.q_norm), reader.optional(tensors.k_norm)
        self._sinks = reader.optional(tensors.sinks)
        row = (spec.num_kv_heads, spec.head_dim)
        self.paged: tuple[PagedArray, ...] = (PagedArray(room.num_blocks, row), PagedArray(room.num_blocks, row))
        self.states: tuple[SlotArray, ...] = ()

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x [T, D] -> x + attention(norm(x)); stores keys and values in the cache."""
        spec, positions = self._spec, mx.array(batch.positions)
        h = rms_norm(x, self._norm, spec.norm_eps)
        q_rows = _plus(self._q(h), self._q_bias)  # those of a gate follow
        q = self._rope(self._heads(q_rows[:, : spec.q_width], self._q_norm), positions)
        k = self._rope(self._heads(_plus(self._k(h), self._k_bias), self._k_norm), positions)
        v = self._heads(_plus(self._v(h), self._v_bias), None)
        blocks = blocks_of(batch)
        for cache, rows in zip(self.paged, (k, v), strict=True):
            cache.write(blocks, batch.positions, rows)
        context = mx.concatenate([self._attend(q[run.first : run.end], run, batch) for run in runs(batch)])
        if spec.gated:
            context = context * mx.sigmoid(q_rows[:, spec.q_width :])
        return x + _plus(self._o(context), self._o_bias)

    def _heads(self, rows: mx.array, norm: mx.array | None) -> mx.array:
        """q, k or v of all rows, normed and clipped: [T, heads, head_dim]."""
        spec = self._spec
        if norm is not None and spec.qk_norm == "full":
            rows = rms_norm(rows, norm, spec.norm_eps)
        heads = rows.reshape(len(rows), -1, spec.head_dim)
        if norm is not None and spec.qk_norm == "head":
            heads = rms_norm(heads, norm, spec.norm_eps)
        return heads if spec.clip_qkv is None else mx.clip(heads, -spec.clip_qkv, spec.clip_qkv)

    def _attend(self, q: mx.array, run: Run, batch: Batch) -> mx.array:
        """The context [n, q_width] of the rows of one sequence, queries [n, num_heads, head_dim]."""
        window, end = self._spec.window, run.position + run.end - run.first
        first = 0 if window is None else max(0, run.position - window + 1)
        table = batch.block_table[run.sequence]
        keys, values = (cache.read(table, first, end).swapaxes(0, 1) for cache in self.paged)  # [kv heads, s, head_dim]
        step = max(1, SCORES_BYTES // (4 * self._spec.num_heads * (end - first)))
        parts = []
        for start in range(0, len(q), step):
            some = q[start : start + step]
            positions = run.position + start + np.arange(len(some))
            parts.append(self._mix(some, keys, values, self._visible(positions, first, end)))
            mx.eval(parts[-1])
        return mx.concatenate(parts)

    def _visible(self, positions: NDArray[np.int64], first: int, end: int) -> NDArray[np.bool_]:
        """Which of the positions first ... end each row sees [n, end - first]."""
        distance = positions[:, None] - np.arange(first, end)
        window = self._spec.window
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def _mix(self, q: mx.array, keys: mx.array, values: mx.array, visible: NDArray[np.bool_]) -> mx.array:
        """Queries [n, num_heads, head_dim], keys and values [kv heads, s, head_dim] -> [n, q_width]."""
        spec, num_rows = self._spec, len(q)
        groups = q.reshape(num_rows, spec.num_kv_heads, spec.group_size, spec.head_dim).transpose(1, 2, 0, 3)
        scores = (groups * spec.scale) @ keys[:, None].swapaxes(2, 3)
        scores = mx.where(mx.array(visible), scores, -mx.inf)
        if self._sinks is not None:
            sinks = self._sinks.reshape(spec.num_kv_heads, spec.group_size, 1, 1)
            scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)[..., : keys.shape[1]]
        return (weights @ values[:, None]).transpose(2, 0, 1, 3).reshape(num_rows, spec.q_width)


def kv_bytes(spec: AttentionSpec, num_tokens: int) -> int:
    """Bytes of a layer's keys and values, for the memory plan."""
    return 2 * paged_bytes(num_tokens, spec.kv_width)


def scratch_bytes(spec: AttentionSpec, max_rows: int, max_context: int) -> int:
    """Bytes that a layer takes while it computes, at most: rows on their way, gathered keys and values, scores, masks."""
    rows = 4 * max_rows * (3 * spec.hidden + 6 * spec.q_width + 4 * spec.kv_width)
    one_row = 4 * spec.num_heads * max_context
    scores = max(one_row, min(SCORES_BYTES, one_row * max_rows))
    return rows + 4 * 2 * 2 * max_context * spec.kv_width + 3 * scores


def _plus(rows: mx.array, bias: mx.array | None) -> mx.array:
    return rows if bias is None else rows + bias
