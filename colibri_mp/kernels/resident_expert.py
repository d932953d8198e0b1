"""Experts that every token uses, in the coordinator's memory: dense blocks, and the shared expert beside the routed ones.

    out[t] = expert(h[t])                         dense blocks, shared experts of DeepSeek and GLM
    out[t] = sigmoid(gate . h[t]) * expert(h[t])  the shared expert of Qwen

It is an `ExpertStage` of one expert, whose weight is 1 or the sigmoid. The dot product runs in 16 lanes, in ascending order, and then over
the lanes as a tree: it depends on the row alone. In plain numpy: `reference.expert`, times 1 / (1 + e^-(h @ gate)).
"""

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels.expert import ExpertStage, scratch_bytes
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.kernels.linear import DEFAULT_PLANES
from colibri_mp.kernels.norm import load_up_to16
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.kernels.vectors import exp16, fma16, largest16, set_f32, splat16, sum16

Floats = npt.NDArray[np.float32]


@compiled
def _gate_rows(h: int, gate: int, weights: int, num_rows: int, width: int) -> None:
    """weights[t] = sigmoid(gate . h[t])."""
    one, zero = splat16(np.float32(1.0)), splat16(np.float32(0.0))
    for t in range(num_rows):
        total = zero
        for i in range(0, width, 16):
            part = load_up_to16(h + 4 * (t * width + i), width - i)
            total = fma16(part, load_up_to16(gate + 4 * i, width - i), total)
        share = one / (one + exp16(splat16(np.float32(0.0) - sum16(total))))
        set_f32(weights + 4 * t, largest16(share))


class ResidentExpert:
    """The experts of one shape that every token uses; one call at a time."""

    def __init__(self, team: ThreadTeam, shape: ExpertShape, max_tokens: int, planes: int = DEFAULT_PLANES) -> None:
        self._stage = ExpertStage(team, shape, 1, max_tokens, 1, planes)
        self._ids, self._first = np.zeros((max_tokens, 1), np.int32), np.zeros(1, np.int32)
        self._ones, self._gated = np.ones((max_tokens, 1), np.float32), np.empty((max_tokens, 1), np.float32)
        self._address = np.zeros(1, np.int64)

    @staticmethod
    def scratch_bytes(shape: ExpertShape, max_tokens: int, planes: int, num_threads: int) -> int:
        """Bytes that it allocates, but for a few KiB; for the memory plan."""
        return scratch_bytes(shape, max_tokens, 1, planes, num_threads) + 12 * max_tokens

    def __call__(self, h: Floats, slab: npt.NDArray[np.uint8], gate: Floats | None = None) -> Floats:
        """h [T, D] float32, C-contiguous; slab: the packed expert, 64-aligned; gate [D] or None -> a new array [T, D]."""
        num_tokens, out = len(h), np.empty_like(h)
        weights = (self._ones if gate is None else self._gated)[:num_tokens]
        if gate is not None:
            assert gate.shape == h.shape[1:]
            assert gate.dtype == h.dtype == np.float32
            _gate_rows(h.ctypes.data, gate.ctypes.data, weights.ctypes.data, num_tokens, gate.size)
        self._address[0] = slab.ctypes.data
        self._stage.run(h, self._ids[:num_tokens], weights, self._first, self._address, out)
        return out
