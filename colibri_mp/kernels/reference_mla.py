"""Latent attention in plain numpy, keys and values unfolded as the papers write it: what the compiled stage computes, for tests.

Sums are float64, so that this is the better of the two; everything that is stored between steps is float32.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch, Chosen
from colibri_mp.kernels.latent_cache import LatentCache
from colibri_mp.kernels.mla_weights import MlaWeights
from colibri_mp.kernels.reference_attention import linear, rms_norm, softmax
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.specs import MlaSpec

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]


def turn(rows: F32Array, tables: RopeTables, positions: NDArray[np.int32], *, interleaved: bool) -> F32Array:
    """Rotary embedding of [T, heads, rope_dim]; of neighbouring pairs the first elements come first in the result."""
    first, second = (rows[..., 0::2], rows[..., 1::2]) if interleaved else np.split(rows, 2, axis=-1)
    cos, sin = tables.cos[positions][:, None, :], tables.sin[positions][:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mla(
    x: F32Array,
    weights: MlaWeights,
    kv_b: F32Array,
    spec: MlaSpec,
    tables: RopeTables,
    cache: LatentCache,
    layer_idx: int,
    batch: Batch,
    chosen: Chosen | None = None,
) -> None:
    """x += attention(norm(x)) in place; stores latents and rope keys in the cache. As `mla.MlaStage`.

    kv_b: the values [heads * (nope + v), L] that `weights.uk` and `weights.uv` were made from.
    """
    h = rms_norm(x, weights.norm, spec.norm_eps)
    if weights.q_a is not None:
        assert weights.q_a_norm is not None
        queries = linear(rms_norm(linear(h, weights.q_a), weights.q_a_norm, spec.lora_eps), weights.q)
    else:
        queries = linear(h, weights.q)
    nope, rope = np.split(queries.reshape(len(x), spec.num_heads, -1), [spec.nope_dim], axis=-1)
    rope = turn(rope, tables, batch.positions, interleaved=spec.interleaved)
    latents, keys = np.split(linear(h, weights.kv_a), [spec.kv_lora_rank], axis=-1)
    latents = rms_norm(latents, weights.kv_a_norm, spec.lora_eps)
    keys = turn(keys[:, None], tables, batch.positions, interleaved=spec.interleaved)[:, 0]
    rows = list(zip(batch.positions.tolist(), batch.sequence_idx.tolist(), strict=True))
    for t, (position, sequence) in enumerate(rows):
        cache.write(layer_idx, batch.block_table[sequence], position, latents[t : t + 1], keys[t : t + 1])
    context = np.empty((len(x), spec.num_heads * spec.v_dim), np.float32)
    for t, (position, sequence) in enumerate(rows):
        read = np.arange(position + 1) if chosen is None else chosen.positions[t, : chosen.counts[t]]
        past_latents, past_keys = cache.read(layer_idx, batch.block_table[sequence], position + 1)
        context[t] = attend(nope[t], rope[t], past_latents[read], past_keys[read], kv_b, spec).reshape(-1)
    x += linear(context, weights.o)


def attend(
    nope: F32Array, rope: F32Array, latents: F32Array, rope_keys: F32Array, kv_b: F32Array, spec: MlaSpec
) -> F64Array:
    """One row: queries [heads, nope] and [heads, rope] over latents [n, L] and rope keys [n, rope] -> [heads, v]."""
    unfolded = (latents.astype(np.float64) @ kv_b.T.astype(np.float64)).reshape(len(latents), spec.num_heads, -1)
    keys, values = np.split(unfolded, [spec.nope_dim], axis=-1)
    scores = np.einsum("hd,shd->hs", nope.astype(np.float64), keys)
    scores += rope.astype(np.float64) @ rope_keys.T.astype(np.float64)
    return np.asarray(np.einsum("hs,shd->hd", softmax(scores * spec.scale), values))
