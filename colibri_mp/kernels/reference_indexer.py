"""The indexer in plain numpy: what `index_stage` computes, for tests and for reading. Sums are float64."""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.index_keys import IndexKeys
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.reference_attention import linear
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.specs import IndexerSpec

F32Array = NDArray[np.float32]


def layer_norm(x: F32Array, weight: F32Array, bias: F32Array, eps: float) -> F32Array:
    """(x - mean) * (variance + eps)^-0.5 * weight + bias over the last axis."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(normed * weight + bias, dtype=np.float32)


def turn_pairs(heads: F32Array, tables: RopeTables, positions: NDArray[np.int32], interleaved: bool) -> F32Array:
    """Rotary embedding of the first elements of [T, heads, head_dim]; pairs are neighbours if `interleaved`, else halves."""
    width, half = tables.rotary_dim, tables.rotary_dim // 2
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, half), slice(half, width))
    cos, sin = tables.cos[positions][:, None, :], tables.sin[positions][:, None, :]
    turned = heads.copy()
    turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
    turned[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return turned


def index_scores(queries: F32Array, gates: F32Array, keys: F32Array) -> NDArray[np.float64]:
    """[n]: of one row's queries [heads, head_dim] with head weights [heads] for keys [n, head_dim]."""
    products = np.einsum("hd,sd->hs", queries.astype(np.float64), keys.astype(np.float64))
    return np.asarray(gates.astype(np.float64) @ np.maximum(products, 0))


def largest(scores: NDArray[np.float64], top_k: int) -> NDArray[np.int32]:
    """Positions of the top_k largest, ascending; of equal ones the lowest positions."""
    return np.sort(np.argsort(-scores, kind="stable")[:top_k]).astype(np.int32)


def choose(
    h: F32Array,
    query_sources: F32Array,
    weights: IndexerWeights,
    spec: IndexerSpec,
    tables: RopeTables,
    cache: IndexKeys,
    layer_idx: int,
    batch: Batch,
) -> list[NDArray[np.int32]]:
    """The positions that each row reads; stores its keys. h [T, D]: normed inputs; query_sources [T, query_rank]."""
    keys = layer_norm(linear(h, weights.k), weights.k_norm, weights.k_bias, spec.norm_eps)[:, None]
    keys = turn_pairs(keys, tables, batch.positions, spec.interleaved)[:, 0]
    queries = linear(query_sources, weights.q).reshape(len(h), spec.num_heads, spec.head_dim)
    queries, gates = turn_pairs(queries, tables, batch.positions, spec.interleaved), linear(h, weights.gates)
    rows = list(zip(batch.positions.tolist(), batch.sequence_idx.tolist(), strict=True))
    for t, (position, sequence) in enumerate(rows):
        cache.write(layer_idx, batch.block_table[sequence], position, keys[t : t + 1])
    return [
        largest(
            index_scores(queries[t], gates[t], cache.read(layer_idx, batch.block_table[sequence], position + 1)),
            spec.top_k,
        )
        for t, (position, sequence) in enumerate(rows)
    ]
