"""Multi-head latent attention of one layer through MLX; the rules are those of `kernels.mla`.

    q = q norm(q_a norm(x)), or q norm(x): of each head a part that meets latents and a part that turns
    latents (normed) and rope keys (turned) of the rows go into the paged cache, one row for all heads
    absorbed: scores = (q W_uk) c + q_rope k_rope, context = (softmax(scores) c) W_uv^T: keys and values are never unfolded
    x + o(context)

With an indexer a row reads the positions that it chooses; all others are masked, not left out.
"""

import mlx.core as mx

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.indexer import Indexer, causal
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray, paged_bytes
from colibri_mp.mlx_backend.matrices import MatrixStack
from colibri_mp.mlx_backend.mixer import Mask, Room, WeightReader
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
        self._rows = PagedArray(room.num_blocks, (spec.kv_lora_rank + spec.rope_dim,))
        self._choice = room.choice
        self._indexer: Indexer | None = None
        if spec.indexer is not None and tensors.indexer is not None:
            self._indexer = Indexer(reader, spec.indexer, tensors.indexer, rope, room.num_blocks)
        keys_of_indexer = () if self._indexer is None else (self._indexer.keys,)
        self.paged: tuple[PagedArray, ...] = (self._rows, *keys_of_indexer)
        self.states: tuple[SlotArray, ...] = ()

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x [T, D] -> x + attention(norm(x)); stores latents and rope keys in the cache."""
        spec, positions = self._spec, mx.array(batch.positions)
        h = rms_norm(x, self._norm, spec.norm_eps)
        sources = self._query_sources(h)
        queries = self._q(sources).reshape(len(x), spec.num_heads, -1)
        latent_q = self._to_latents(queries[..., : spec.nope_dim].swapaxes(0, 1))  # [heads, T, L]
        rope_q = self._turn(queries[..., spec.nope_dim :], positions).swapaxes(0, 1)
        q = mx.concatenate([latent_q, rope_q], axis=-1) * spec.scale
        found = self._kv_a(h)
        latents = rms_norm(found[:, : spec.kv_lora_rank], self._kv_a_norm, spec.lora_eps)
        keys = self._turn(found[:, None, spec.kv_lora_rank :], positions)[:, 0]
        blocks = blocks_of(batch)
        self._rows.write(blocks, batch.positions, mx.concatenate([latents, keys], axis=-1))
        reading = self._reading(h, sources, batch)
        context = [
            self._attend(q[:, run.first : run.end], run, batch, mask)
            for run, mask in zip(runs(batch), reading, strict=True)
        ]
        heads = self._values(mx.concatenate(context, axis=1)).swapaxes(0, 1)
        return x + self._o(heads.reshape(len(x), -1))

    def _query_sources(self, h: mx.array) -> mx.array:
        """What queries are made from: h itself, or fewer numbers."""
        if self._q_a is None:
            return h
        assert self._q_a_norm is not None
        return rms_norm(self._q_a(h), self._q_a_norm, self._spec.lora_eps)

    def _reading(self, h: mx.array, sources: mx.array, batch: Batch) -> list[Mask]:
        """Which positions the rows of each run read [n, end]."""
        if self._spec.indexer is None:
            return [causal(run) for run in runs(batch)]
        if self._indexer is not None:
            self._choice.masks = self._indexer(h, sources, batch)
        return self._choice.masks

    def _attend(self, q: mx.array, run: Run, batch: Batch, reading: Mask) -> mx.array:
        """Mixed latents [heads, n, L] of the rows of one sequence, queries [heads, n, L + rope]; `reading` [n, end]."""
        num_rows = run.end - run.first
        end = run.position + num_rows
        rows = self._rows.read(batch.block_table[run.sequence], 0, end)
        step = max(1, SCORES_BYTES // (4 * self._spec.num_heads * end))
        parts = []
        for start in range(0, num_rows, step):
            some = q[:, start : start + step]
            scores = mx.where(mx.array(reading[start : start + step]), some @ rows.T, -mx.inf)
            parts.append(mx.softmax(scores, axis=-1, precise=True) @ rows[:, : self._spec.kv_lora_rank])
            mx.eval(parts[-1])
        return mx.concatenate(parts, axis=1)


def kv_bytes(spec: MlaSpec, num_tokens: int) -> int:
    """Bytes of a layer's latents and rope keys, and of an indexer's keys, for the memory plan."""
    of_indexer = 0 if spec.indexer is None or spec.shares_choice else spec.indexer.head_dim
    return paged_bytes(num_tokens, spec.kv_lora_rank + spec.rope_dim) + paged_bytes(num_tokens, of_indexer)


def scratch_bytes(spec: MlaSpec, max_rows: int, max_context: int) -> int:
    """Bytes that a layer takes while it computes, at most: rows on their way, gathered latents, scores, and W_uk or W_uv as float32."""
    width = spec.kv_lora_rank + spec.rope_dim
    rows = 4 * max_rows * (3 * spec.hidden + 3 * spec.q_width + spec.num_heads * (4 * width + 2 * spec.v_dim))
    one_row = 4 * spec.num_heads * max_context
    scores = max(one_row, min(SCORES_BYTES, one_row * max_rows))
    if spec.indexer is not None:
        scores += 16 * max_rows * max_context  # masks, and the order of scores
    unfolded = 4 * spec.num_heads * max(spec.nope_dim, spec.v_dim) * spec.kv_lora_rank
    return rows + 2 * 4 * max_context * width + 3 * scores + 2 * unfolded
