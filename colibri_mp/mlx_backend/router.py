"""The router of a layer: its matrix is multiplied by MLX, the choice is made on the host, where the ids must go anyway.

The rules are those of `kernels.router`: `reference_attention.route` says them in plain numpy, float64; here all is float32.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.mlx_backend.matrices import Matrix
from colibri_mp.specs import RouterSpec

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Router:
    """gate [E, D]; `bias` [E] of the logits; `correction` [E] of the scores, for the choice only, on the host."""

    gate: Matrix
    bias: mx.array | None
    correction: Floats | None

    def logits(self, h: mx.array) -> mx.array:
        """[T, E]."""
        logits = self.gate(h)
        return logits if self.bias is None else logits + self.bias


def choose(logits: Floats, correction: Floats | None, spec: RouterSpec) -> tuple[Ints, Floats]:
    """The chosen experts [T, K], ascending, -1 where top-p drops one; and their weights [T, K]."""
    scores: Floats = _softmax(logits) if spec.scoring == "softmax" else np.asarray(1 / (1 + np.exp(-logits)))
    choice: Floats = scores if correction is None else np.asarray(scores + correction)
    if spec.kept_groups < spec.num_groups:
        choice = _in_kept_groups(choice, spec)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : spec.top_k]
    weights: Floats = np.take_along_axis(scores, ids, axis=-1)
    if spec.top_p < 1:
        ids, weights = _without_rest(ids, weights, spec.top_p)
    by_id = np.argsort(ids, axis=-1, kind="stable")
    ids, weights = np.take_along_axis(ids, by_id, axis=-1), np.take_along_axis(weights, by_id, axis=-1)
    if spec.norm_topk_prob:
        weights = np.asarray(weights / weights.sum(axis=-1, keepdims=True))
    return np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(weights * np.float32(spec.scaling), np.float32)


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _in_kept_groups(choice: Floats, spec: RouterSpec) -> Floats:
    """-inf in all groups but the best; what is best: see `RouterSpec`."""
    groups = choice.reshape(len(choice), spec.num_groups, -1)
    best = np.sort(groups, axis=-1)[..., -2 if spec.scoring == "sigmoid" else -1 :].sum(axis=-1)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : spec.kept_groups]
    refused = np.ones(best.shape, bool)
    np.put_along_axis(refused, kept, False, axis=-1)
    return np.where(refused[..., None], np.float32(-np.inf), groups).reshape(choice.shape)


def _without_rest(ids: NDArray[np.int64], weights: Floats, top_p: float) -> tuple[NDArray[np.int64], Floats]:
    """Of each row the largest weights until their sum reaches `top_p` of all; the others become id -1, weight 0."""
    by_weight = np.argsort(-weights, axis=-1, kind="stable")
    ids, weights = np.take_along_axis(ids, by_weight, axis=-1), np.take_along_axis(weights, by_weight, axis=-1)
    sums = np.cumsum(weights, axis=-1)
    dropped = np.pad(sums[:, :-1], ((0, 0), (1, 0))) >= np.float32(top_p) * sums[:, -1:]
    dropped[:, 0] = False
    return np.where(dropped, -1, ids), np.where(dropped, np.float32(0), weights)
