"""Multi-head latent attention of one layer through MLX; the rules are those of `kernels.mla`.

q = q norm(q_a norm(x)), or q norm(x): of each head a part that meets latents and a part that turns
latents (normed) and rope keys (turned) of the rows go into the paged cache, one row for all heads
absorbed: scores = (q W_uk) c + q_rope k_rope, context = (softmax(scores) c) W_uv^T: keys and values are never unfolded
x + o(context)
"""

import mlx.core as mx
import numpy as np

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray, paged_bytes
from colibri_mp.mlx_backend.matrices import MatrixStack
from colibri_mp.mlx_backend.mixer import Room, WeightReader
from colibri_mp.mlx_backend.rows import Rope, Run, blocks_of, rms_norm, runs
from colibri_mp.models.structure import MlaTensors
from colibri_mp.specs import MlaSpec

SCORES_BYTES = 16 << 20


class Mla:
    """The latent attention of a layer, with its weights, latents and rope keys."""

    def __init__(self, reader: WeightReader, spec: MlaSpec, tensors: MlaTensors, rope: Rope, room: Room) -> None:
        self._spec, self._turn = spec, rope.neighbours if spec.interleaved else rope
        self._norm, self._kv_a_norm = reader.vector(tensors.norm), reader.vector(tensors.kv_a_norm)
        self._q_a = None if tensors.q_a is None else reader.matrix(tensors.q_a)
        self._q_a_norm = reader.optional(tensors.q_a_norm)
        self._q, self._kv_a, self._o = map(reader.matrix, (tensors.q, tensors.kv_a, tensors.o))
        if tensors.kv_b is not None:
            both = MatrixStack(reader.matrix(tensors.kv_b), spec.num_heads)
            keys = both.rows(0, spec.nope_dim)
            self._to_latents, self._values = keys.back, both.rows(spec.nope_dim, spec.nope_dim + spec.v_dim)
        else:
            assert tensors.embed_q is not None
            assert tensors.unembed is not None
            self._to_latents = MatrixStack(reader.matrix(tensors.embed_q), spec.num_heads).__call__
            self._values = MatrixStack(reader.matrix(tensors.unembed), spec.num_heads)
        self.paged: tuple[PagedArray, ...] = (PagedArray(room.num_blocks, (spec.kv_lora_rank + spec.rope_dim,)),)
        self.states: tuple[SlotArray, ...] = ()

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x [T, D] -> x + attention(norm(x)); stores latents and rope keys in the cache."""
        spec, positions = self._spec, mx.array(batch.positions)
        h = rms_norm(x, self._norm, spec.norm_eps)
        queries = self._queries(h).reshape(len(x), spec.num_heads, -1)
        latent_q = self._to_latents(queries[..., : spec.nope_dim].swapaxes(0, 1))  # [heads, T, L]
        rope_q = self._turn(queries[..., spec.nope_dim :], positions).swapaxes(0, 1)
        q = mx.concatenate([latent_q, rope_q], axis=-1) * spec.scale
        found = self._kv_a(h)
        latents = rms_norm(found[:, : spec.kv_lora_rank], self._kv_a_norm, spec.lora_eps)
        keys = self._turn(found[:, None, spec.kv_lora_rank :], positions)[:, 0]
        blocks = blocks_of(batch)
        self.paged[0].write(blocks, batch.positions, mx.concatenate([latents, keys], axis=-1))
        context = [self._attend(q[:, run.first : run.end], run, batch) for run in runs(batch)]
        heads = self._values(mx.concatenate(context, axis=1)).swapaxes(0, 1)
        return x + self._o(heads.reshape(len(x), -1))

    def _queries(self, h: mx.array) -> mx.array:
        if self._q_a is None:
            return self._q(h)
        assert self._q_a_norm is not None
        return self._q(rms_norm(self._q_a(h), self._q_a_norm, self._spec.lora_eps))

    def _attend(self, q: mx.array, run: Run, batch: Batch) -> mx.array:
        """Mixed latents [heads, n, L] of the rows of one sequence, queries [heads, n, L + rope]."""
        num_rows = run.end - run.first
        end = run.position + num_rows
        rows = self.paged[0].read(batch.block_table[run.sequence], 0, end)
        step = max(1, SCORES_BYTES // (4 * self._spec.num_heads * end))
        parts = []
        for start in range(0, num_rows, step):
            some = q[:, start : start + step]
            visible = np.arange(end) <= run.position + start + np.arange(some.shape[1])[:, None]
            scores = mx.where(mx.array(visible), some @ rows.T, -mx.inf)
            parts.append(mx.softmax(scores, axis=-1, precise=True) @ rows[:, : self._spec.kv_lora_rank])
            mx.eval(parts[-1])
        return mx.concatenate(parts, axis=1)


def kv_bytes(spec: MlaSpec, num_tokens: int) -> int:
    """Bytes of a layer's latents and rope keys, for the memory plan."""
    return paged_bytes(num_tokens, spec.kv_lora_rank + spec.rope_dim)


def scratch_bytes(spec: MlaSpec, max_rows: int, max_context: int) -> int:
    """Bytes that a layer takes while it computes, at most: rows on their way, gathered latents, scores, and W_uk or W_uv as float32."""
    width = spec.kv_lora_rank + spec.rope_dim
    rows = 4 * max_rows * (3 * spec.hidden + 3 * spec.q_width + spec.num_heads * (4 * width + 2 * spec.v_dim))
    one_row = 4 * spec.num_heads * max_context
    scores = max(one_row, min(SCORES_BYTES, one_row * max_rows))
    unfolded = 4 * spec.num_heads * max(spec.nope_dim, spec.v_dim) * spec.kv_lora_rank
    return rows + 2 * 4 * max_context * width + 3 * scores + 2 * unfolded
