"""The experts of one layer on the device: the calls of `kernels.expert.ExpertStage`, computed by MLX.

    begin     list the (token, choice) pairs by expert: *rows*; x goes to the device
    compute   experts that have come: their slots in the tier, then for all their rows at once
              gather_qmm gate, up ─▶ activation ─▶ gather_qmm down ─▶ partial results of the rows, on the host
    finish    each token's partial results times weights are added in ascending expert id

Partial results are kept apart until all are there, so the sum has one order whatever order the disk answers in.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.mlx_backend.activation import activate
from colibri_mp.mlx_backend.device import to_device, to_host
from colibri_mp.mlx_backend.expert_tier import ExpertTier

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

HIDDEN_BYTES = 16 << 20
"""Of the rows that are computed at a time: one of gate, up and their product, at most."""


def scratch_bytes(shape: ExpertShape, max_tokens: int, top_k: int) -> int:
    """Bytes that a stage takes while it computes, for the memory plan: x, hidden columns, partial results and their sums."""
    rows = max_tokens * top_k
    hidden = min(rows * shape.width * 4, HIDDEN_BYTES)
    return 4 * hidden + 4 * shape.hidden * (3 * rows + 3 * max_tokens)


class MlxExpertStage:
    """See the module docstring. One call at a time; layers that share a tier share nothing else."""

    def __init__(self, tier: ExpertTier, layer: int, max_tokens: int, top_k: int) -> None:
        self._tier, self._layer = tier, layer
        self.max_tokens, self.top_k = max_tokens, top_k
        self._x = mx.zeros((0, 1, tier.shape.hidden))
        self._num_tokens = self._rows_done = 0
        self._experts: Ints = np.zeros(0, np.int32)  # of each row, ascending
        self._token_of: Ints = self._experts
        self._weight_of: Floats = np.zeros(0, np.float32)
        self._partial: Floats = np.zeros((0, tier.shape.hidden), np.float32)

    def begin(self, x: Floats, ids: Ints, weights: Floats) -> None:
        """Start a step: x float32 [T, D], ids int32 [T, K] (negative: not for us), weights float32 [T, K]; nothing of them is kept."""
        assert len(x) <= self.max_tokens
        assert ids.shape == weights.shape == (len(x), self.top_k)
        flat = ids.ravel()
        order = np.argsort(flat, kind="stable")
        order = order[np.searchsorted(flat[order], 0) :]
        self._experts, self._token_of = flat[order], (order // self.top_k).astype(np.int32)
        self._weight_of = weights.ravel()[order]
        self._partial = np.empty((len(order), x.shape[1]), np.float32)
        self._x, self._num_tokens, self._rows_done = to_device(x)[:, None], len(x), 0

    def compute(self, expert_ids: Ints, slab_addresses: NDArray[np.int64]) -> None:
        """Partial results of some experts: ids int32 [n], addresses int64 [n] of their slabs, unchanged until this returns."""
        for start in range(0, len(expert_ids), self._tier.num_slots):
            part = slice(start, start + self._tier.num_slots)
            experts = expert_ids[part].tolist()
            slots = self._tier.place(self._layer, experts, slab_addresses[part])
            first = np.searchsorted(self._experts, expert_ids[part], side="left").tolist()
            end = np.searchsorted(self._experts, expert_ids[part], side="right").tolist()
            spans = list(zip(first, end, slots, strict=True))
            rows = np.concatenate([np.arange(start, stop) for start, stop, _ in spans])
            self._compute_rows(rows, np.repeat(slots, [stop - start for start, stop, _ in spans]))

    def _compute_rows(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        step = max(1, HIDDEN_BYTES // (4 * self._tier.shape.width))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            self._partial[some] = to_host(self._multiply(some, slots[start : start + step]))
        self._rows_done += len(rows)

    def _multiply(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> mx.array:
        """Partial results [rows, D]."""
        tier = self._tier
        tokens, rhs = to_device(self._token_of[rows].astype(np.uint32)), to_device(slots.astype(np.uint32))
        gate, up = tier.gate.multiply(self._x, tokens, rhs), tier.up.multiply(self._x, tokens, rhs)
        if tier.biases:
            gate, up = gate + tier.biases[0][rhs][:, None], up + tier.biases[1][rhs][:, None]
        hidden = activate(gate, up, tier.shape.clamp)
        down = tier.down.multiply(hidden, mx.arange(len(rows), dtype=mx.uint32), rhs)[:, 0]
        return down + tier.biases[2][rhs] if tier.biases else down

    def finish(self, out: Floats) -> None:
        """out [T, D] = the weighted sums; every routed expert must have been computed, once."""
        assert self._rows_done == len(self._experts), f"{self._rows_done} of {len(self._experts)} rows were computed"
        out[:] = 0.0
        by_token = np.argsort(self._token_of, kind="stable")
        tokens = self._token_of[by_token]
        rank = np.arange(len(tokens)) - np.searchsorted(tokens, tokens, side="left")
        for i in range(self.top_k):
            rows = by_token[rank == i]
            out[self._token_of[rows]] += self._weight_of[rows, None] * self._partial[rows]

    def run(
        self, x: Floats, ids: Ints, weights: Floats, expert_ids: Ints, slab_addresses: NDArray[np.int64], out: Floats
    ) -> None:
        """`begin`, `compute` with all the experts of the step, and `finish`."""
        self.begin(x, ids, weights)
        self.compute(expert_ids, slab_addresses)
        self.finish(out)

    def bind(self, x: Floats, ids: Ints, weights: Floats, out: Floats) -> "BoundMlxStep":
        """`run` for arrays that stay where they are."""
        return BoundMlxStep(self, (x, ids, weights, out))


class BoundMlxStep:
    """`MlxExpertStage.run` for arrays that stay where they are. Made by `bind`."""

    def __init__(self, stage: MlxExpertStage, arrays: tuple[NDArray[Any], ...]) -> None:
        self._stage, self._arrays = stage, arrays

    def run(self, expert_ids: Sequence[int], slab_addresses: NDArray[np.int64]) -> None:
        """Ids of the distinct experts in the ids that are bound now, int64 [n] addresses of their slabs."""
        x, ids, weights, out = self._arrays
        self._stage.run(x, ids, weights, np.array(expert_ids, np.int32), slab_addresses, out)
