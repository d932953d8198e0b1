"""The indexer of sparse attention through MLX: which positions a row's latent attention reads; the rules are those of `kernels.indexer`.

    score of a position = sum over heads of gate * max(0, query . key); a row that sees more than `top_k` positions reads the largest

The scores come from MLX, the choice is made on the host, as a mask of the positions of each row. A layer that shares its choice takes
the masks of the last layer before it that has an indexer: `mixer.Choice` holds them.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.device import to_host
from colibri_mp.mlx_backend.kv_cache import PagedArray
from colibri_mp.mlx_backend.mixer import Mask, WeightReader
from colibri_mp.mlx_backend.rows import Rope, Run, blocks_of, runs
from colibri_mp.models.structure import IndexerTensors
from colibri_mp.specs import IndexerSpec

SCORES_BYTES = 16 << 20


class Indexer:
    """The indexer of a layer, with its weights and keys."""

    def __init__(
        self, reader: WeightReader, spec: IndexerSpec, tensors: IndexerTensors, rope: Rope, num_blocks: int
    ) -> None:
        self._spec = spec
        self._turn = rope.neighbours if spec.interleaved else rope
        self._q, self._k, self._gates = map(reader.matrix, tensors.matrices)
        self._k_norm, self._k_bias = map(reader.vector, tensors.vectors)
        self.keys = PagedArray(num_blocks, (spec.head_dim,))

    def __call__(self, h: mx.array, query_sources: mx.array, batch: Batch) -> list[Mask]:
        """Of each run of the batch which positions its rows read [n, end]; stores the keys of the rows.

        h [T, D]: normed inputs; query_sources [T, query_rank]: what the attention's queries are made from too.
        """
        spec, positions = self._spec, mx.array(batch.positions)
        keys = self._turn(_layer_norm(self._k(h), self._k_norm, self._k_bias, spec.norm_eps)[:, None], positions)
        self.keys.write(blocks_of(batch), batch.positions, keys[:, 0])
        queries = self._q(query_sources).reshape(len(h), spec.num_heads, spec.head_dim)
        queries, gates = self._turn(queries, positions).swapaxes(0, 1), self._gates(h)
        return [
            self._choose(queries[:, run.first : run.end], gates[run.first : run.end], run, batch) for run in runs(batch)
        ]

    def _choose(self, queries: mx.array, gates: mx.array, run: Run, batch: Batch) -> Mask:
        """queries [heads, n, head_dim], gates [n, heads] of one sequence's rows -> [n, end]."""
        end = run.position + run.end - run.first
        visible = causal(run)
        if end <= self._spec.top_k:
            return visible
        keys = self.keys.read(batch.block_table[run.sequence], 0, end)
        step = max(1, SCORES_BYTES // (4 * self._spec.num_heads * end))
        for start in range(0, len(gates), step):
            products = mx.maximum(queries[:, start : start + step] @ keys.T, 0)
            scores = (gates[start : start + step].T[:, :, None] * products).sum(axis=0)
            visible[start : start + step] = _largest(to_host(scores), visible[start : start + step], self._spec.top_k)
        return visible


def causal(run: Run) -> Mask:
    """Every position up to the row's own [n, end]."""
    end = run.position + run.end - run.first
    return np.arange(end) <= np.arange(run.position, end)[:, None]


def _largest(scores: NDArray[np.float32], visible: Mask, top_k: int) -> Mask:
    """The top_k visible ones with the largest scores of each row; of equal ones the lowest positions."""
    order = np.argsort(np.where(visible, -scores, np.inf), axis=-1, kind="stable")[:, :top_k]
    chosen = np.zeros(visible.shape, bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen & visible


def _layer_norm(x: mx.array, weight: mx.array, bias: mx.array, eps: float) -> mx.array:
    centred = x - mx.mean(x, axis=-1, keepdims=True)
    return centred * mx.rsqrt(mx.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias
