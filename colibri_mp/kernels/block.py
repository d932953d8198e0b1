"""Everything that a layer does before its experts, as one compiled call: the attention block, then the router.

Between two answers of a worker the coordinator makes one such call, so that the threads are woken once for each layer.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import attention_stage, normed_linear
from colibri_mp.kernels.attention import AttentionStage
from colibri_mp.kernels.attention_inputs import AttentionWeights, Batch
from colibri_mp.kernels.attention_stage import NUM_PHASES, attention_phases
from colibri_mp.kernels.jit import Native
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.router import RouterStage, router_phases
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.kernels.vectors import record_at

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]

FRAME = np.dtype([("attention", attention_stage.FRAME), ("router", normed_linear.FRAME)])
_ATTENTION_BYTES = attention_stage.FRAME.itemsize


def _block_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    if attention_phases(job.attention, control, tag):
        router_phases(job.router, control, tag)


STAGE = Native(_block_stage)


class BlockStage:
    """`attention` and `router` in one call, with the buffers and the bits of the two; they can still be called alone."""

    def __init__(self, team: ThreadTeam, attention: AttentionStage, router: RouterStage) -> None:
        self._team, self._attention, self._router = team, attention, router
        self._frame = np.zeros(1, FRAME)
        self._bytes = self._frame.view(np.uint8)

    def __call__(
        self, x: F32Array, weights: AttentionWeights, kv: KVCache, layer_idx: int, batch: Batch,
        mlp_norm: F32Array, gate: PackedMatrix,
    ) -> tuple[F32Array, I32Array, F32Array]:  # fmt: skip
        """x [T, D] float32: x += attention(norm(x)) in place; then h = mlp_norm(x) [T, D], ids [T, K] and weights [T, K].

        Arguments and errors: `AttentionStage`; results, which are views: `RouterStage`.
        """
        attention = self._attention.frame(x, weights, kv, layer_idx, batch)
        router = self._router.frame(x, mlp_norm, gate, NUM_PHASES)
        self._bytes[:_ATTENTION_BYTES], self._bytes[_ATTENTION_BYTES:] = attention.view(np.uint8), router.view(np.uint8)
        self._team.run(STAGE, self._frame)
        return self._router.results(x.shape[0])
