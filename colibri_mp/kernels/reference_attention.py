"""Attention, router and head in plain numpy: what the compiled stages compute, for tests and for reading.

Sums are float64, so that these are the better of the two; everything that is stored between steps is float32.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import AttentionWeights, Batch
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.reference import unpack
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.router import RouterWeights
from colibri_mp.specs import AttentionSpec, RouterSpec

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]


def rms_norm(x: F32Array, weight: F32Array, eps: float) -> F32Array:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last axis."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight
    return np.asarray(normed, dtype=np.float32)


def linear(x: F32Array, weight: PackedMatrix, bias: F32Array | None = None) -> F32Array:
    """x [T, K] W^T + bias -> [T, N]."""
    dense = unpack(weight.format, weight.rows, weight.cols, weight.data)
    product = x.astype(np.float64) @ dense.T.astype(np.float64)
    return np.asarray(product if bias is None else product + bias, dtype=np.float32)


def turn(heads: F32Array, tables: RopeTables, positions: NDArray[np.int32]) -> F32Array:
    """Rotary embedding of [T, heads, head_dim], pairs (i, i + rotary_dim / 2)."""
    half = tables.rotary_dim // 2
    cos, sin = tables.cos[positions][:, None, :], tables.sin[positions][:, None, :]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def softmax(scores: F64Array) -> F64Array:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def project(
    h: F32Array, matrix: PackedMatrix, bias: F32Array | None, norm: F32Array | None, num_heads: int, spec: AttentionSpec
) -> F32Array:
    """q, k or v of all tokens, normed and clipped: [T, num_heads, head_dim]."""
    rows = linear(h, matrix, bias)
    if norm is not None and spec.qk_norm == "full":
        rows = rms_norm(rows, norm, spec.norm_eps)
    heads = rows.reshape(len(h), num_heads, spec.head_dim)
    if norm is not None and spec.qk_norm == "head":
        heads = rms_norm(heads, norm, spec.norm_eps)
    return heads if spec.clip_qkv is None else np.clip(heads, -spec.clip_qkv, spec.clip_qkv)


def project_queries(h: F32Array, weights: AttentionWeights, spec: AttentionSpec) -> tuple[F32Array, F32Array | None]:
    """q of all tokens [T, num_heads, head_dim], and the factors [T, num_heads * head_dim] of what the heads give, if they are gated."""
    if not spec.gated:
        return project(h, weights.q, weights.q_bias, weights.q_norm, spec.num_heads, spec), None
    rows = linear(h, weights.q)
    heads = rows[:, : spec.q_width].reshape(len(h), spec.num_heads, spec.head_dim)
    if weights.q_norm is not None:
        heads = rms_norm(heads, weights.q_norm, spec.norm_eps)
    if spec.clip_qkv is not None:
        heads = np.clip(heads, -spec.clip_qkv, spec.clip_qkv)
    return heads, np.asarray(1 / (1 + np.exp(-rows[:, spec.q_width :].astype(np.float64))), np.float32)


def attend(
    query: F32Array, keys: F32Array, values: F32Array, spec: AttentionSpec, window: int | None, sinks: F32Array | None
) -> F64Array:
    """One row: query [num_heads, head_dim] at the last of the positions of keys and values [n, num_kv_heads, head_dim]."""
    start = 0 if window is None else max(0, len(keys) - window)
    visible = np.repeat(keys[start:], spec.group_size, axis=1).astype(np.float64)
    scores = np.einsum("hd,shd->hs", query.astype(np.float64), visible) * spec.scale
    if sinks is not None:
        scores = np.append(scores, sinks[:, None], axis=1)
    weights = softmax(scores)[:, : len(visible)]
    mixed = np.einsum("hs,shd->hd", weights, np.repeat(values[start:], spec.group_size, axis=1).astype(np.float64))
    return np.asarray(mixed)


def attention(
    x: F32Array,
    weights: AttentionWeights,
    spec: AttentionSpec,
    tables: RopeTables,
    kv: KVCache,
    layer_idx: int,
    batch: Batch,
) -> None:
    """x += attention(norm(x)) in place; stores keys and values in the cache. As `attention.AttentionStage`."""
    h = rms_norm(x, weights.norm, spec.norm_eps)
    q, gate = project_queries(h, weights, spec)
    queries = turn(q, tables, batch.positions)
    keys = turn(project(h, weights.k, weights.k_bias, weights.k_norm, spec.num_kv_heads, spec), tables, batch.positions)
    values = project(h, weights.v, weights.v_bias, None, spec.num_kv_heads, spec)
    rows = list(zip(batch.positions.tolist(), batch.sequence_idx.tolist(), strict=True))
    for t, (position, sequence) in enumerate(rows):
        kv.write(layer_idx, batch.block_table[sequence], position, keys[t : t + 1], values[t : t + 1])
    context, window = np.empty((len(x), spec.q_width), np.float32), weights.window or spec.window
    for t, (position, sequence) in enumerate(rows):
        past_keys, past_values = kv.read(layer_idx, batch.block_table[sequence], position + 1)
        context[t] = attend(queries[t], past_keys, past_values, spec, window, weights.sinks).reshape(-1)
    x += linear(context if gate is None else context * gate, weights.o, weights.o_bias)


def route(
    x: F32Array, norm: F32Array, router: RouterWeights, spec: RouterSpec, norm_eps: float
) -> tuple[F32Array, NDArray[np.int32], F32Array]:
    """(h, ids, weights) as `router.RouterStage`."""
    h = rms_norm(x, norm, norm_eps)
    return h, *choose(linear(h, router.gate, router.bias), router.correction, spec)


def choose(logits: F32Array, correction: F32Array | None, spec: RouterSpec) -> tuple[NDArray[np.int32], F32Array]:
    """The experts [T, K], ascending, and their weights, of a router's logits [T, E]."""
    scores, choice = score(logits, correction, spec)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    by_weight = np.argsort(-weights, axis=-1, kind="stable")
    ids, weights = np.take_along_axis(ids, by_weight, axis=-1), np.take_along_axis(weights, by_weight, axis=-1)
    if spec.top_p < 1:
        sums = np.cumsum(weights, axis=-1)
        dropped = np.pad(sums[:, :-1], ((0, 0), (1, 0))) >= np.float32(spec.top_p) * sums[:, -1:]
        dropped[:, 0] = False
        ids, weights = np.where(dropped, -1, ids), np.where(dropped, np.float32(0), weights)
    by_id = np.argsort(ids, axis=-1, kind="stable")
    ids, weights = np.take_along_axis(ids, by_id, axis=-1), np.take_along_axis(weights, by_id, axis=-1)
    if spec.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids.astype(np.int32), weights * np.float32(spec.scaling)


def score(logits: F32Array, correction: F32Array | None, spec: RouterSpec) -> tuple[F32Array, F32Array]:
    """[T, E]: the scores, and what experts are chosen by: corrected, and -inf in groups that are not kept."""
    wide = logits.astype(np.float64)
    scores = np.asarray(softmax(wide) if spec.scoring == "softmax" else 1 / (1 + np.exp(-wide)), dtype=np.float32)
    choice = scores if correction is None else scores + correction
    groups = choice.reshape(len(choice), spec.num_groups, -1)
    best = np.sort(groups, axis=-1)[..., -2 if spec.scoring == "sigmoid" else -1 :].sum(axis=-1)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : spec.kept_groups]
    refused = np.ones(best.shape, bool)
    np.put_along_axis(refused, kept, False, axis=-1)
    return scores, np.where(refused[..., None], np.float32(-np.inf), groups).reshape(choice.shape)


def head(x: F32Array, norm: F32Array, weight: PackedMatrix, norm_eps: float) -> F32Array:
    """Logits [R, V] of the rows x [R, D]."""
    return linear(rms_norm(x, norm, norm_eps), weight)
