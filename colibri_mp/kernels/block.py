"""Everything that a layer does before its experts, as one compiled call: the attention block, then the router.

Between two answers of a worker the coordinator makes one such call, so that the threads are woken once for each layer.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import atomic, attention_stage, normed_linear
from colibri_mp.kernels.attention import AttentionStage
from colibri_mp.kernels.attention_inputs import AttentionWeights, Batch
from colibri_mp.kernels.attention_stage import NUM_PHASES, attention_phases
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.router import RouterStage, RouterWeights, router_phases
from colibri_mp.kernels.team import ThreadTeam, barrier, done, take
from colibri_mp.kernels.vectors import record_at

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]

FRAME = np.dtype([("attention", attention_stage.FRAME), ("router", normed_linear.FRAME), ("time", np.int64)])
_ROUTER_START = attention_stage.FRAME.itemsize
_ROUTER_END = _ROUTER_START + normed_linear.FRAME.itemsize
_TIME, _ROUTER, _ONE_CHUNK = (fixed(number) for number in (NUM_PHASES, NUM_PHASES + 1, 1))


@compiled
def _time_phase(job: Any, control: int, tag: int) -> bool:
    """Note when the attention has ended. False: the job is over, leave."""
    if take(control, tag, _TIME, _ONE_CHUNK) >= 0:
        atomic.clock_gettime(atomic.PERF_COUNTER_CLOCK, job.time)
        done(control, _TIME)
    return barrier(control, tag, _TIME, _ONE_CHUNK)


def _block_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    if attention_phases(job.attention, control, tag) and _time_phase(job, control, tag):
        router_phases(job.router, control, tag, _ROUTER)


STAGE = Native(_block_stage)


class BlockStage:
    """`attention` and `router` in one call, with the buffers and the bits of the two; they can still be called alone."""

    def __init__(self, team: ThreadTeam, attention: AttentionStage, router: RouterStage) -> None:
        self._team, self._attention, self._router = team, attention, router
        self._frame, self._time = np.zeros(1, FRAME), np.zeros(2, np.int64)
        self._frame["time"] = self._time.ctypes.data
        self._bytes = self._frame.view(np.uint8)

    def __call__(
        self, x: F32Array, weights: AttentionWeights, kv: KVCache, layer_idx: int, batch: Batch,
        mlp_norm: F32Array, router: RouterWeights,
    ) -> tuple[F32Array, I32Array, F32Array]:  # fmt: skip
        """x [T, D] float32: x += attention(norm(x)) in place; then h = mlp_norm(x) [T, D], ids [T, K] and weights [T, K].

        Arguments and errors: `AttentionStage`; results, which are views: `RouterStage`.
        """
        attention_frame = self._attention.frame(x, weights, kv, layer_idx, batch)
        router_frame = self._router.frame(x, mlp_norm, router)
        self._bytes[:_ROUTER_START] = attention_frame.view(np.uint8)
        self._bytes[_ROUTER_START:_ROUTER_END] = router_frame.view(np.uint8)
        self._team.run(STAGE, self._frame)
        return self._router.results(x.shape[0])

    @property
    def attention_ended_s(self) -> float:
        """When the attention of the last call ended, by `time.perf_counter`."""
        seconds, nanoseconds = self._time.tolist()
        return float(seconds + nanoseconds * 1e-9)
