"""An indexer as a stage of its own, for tests and benchmarks: attention has its phases among its own.

0      prepare   rows of h and of the query sources
1..4   `index_stage`
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import index_stage
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.index_keys import IndexKeys
from colibri_mp.kernels.index_stage import index_phases, prepare_input_row, prepare_query_row
from colibri_mp.kernels.indexer import Indexer, IndexerWeights
from colibri_mp.kernels.jit import Native, compiled
from colibri_mp.kernels.stage_parts import take_scratch
from colibri_mp.kernels.team import PHASE_0, PHASE_1, ThreadTeam, aligned_bytes, barrier, done, take
from colibri_mp.kernels.vectors import record_at

F32Array = NDArray[np.float32]

_FIELDS = ("h", "h_stride", "sources", "sources_stride", "scratch", "scratch_bytes", "num_scratches")
FRAME = np.dtype([("index", index_stage.FRAME), *[(name, np.int64) for name in _FIELDS]])


@compiled
def _prepare_phase(job: Any, control: int, tag: int) -> bool:
    chunk = take(control, tag, PHASE_0, job.index.num_tokens)
    while chunk >= 0:
        prepare_input_row(job.index, job.h + chunk * job.h_stride, chunk)
        prepare_query_row(job.index, job.sources + chunk * job.sources_stride, chunk)
        done(control, PHASE_0)
        chunk = take(control, tag, PHASE_0, job.index.num_tokens)
    return barrier(control, tag, PHASE_0, job.index.num_tokens)


def _index_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    scratch = take_scratch(job, control, tag)
    if _prepare_phase(job, control, tag):
        index_phases(job.index, control, tag, PHASE_1, scratch)


STAGE = Native(_index_stage)


class IndexerAlone:
    """Runs an indexer on rows that are given."""

    def __init__(self, team: ThreadTeam, indexer: Indexer) -> None:
        self.indexer, self._team, self._frame = indexer, team, np.zeros(1, FRAME)
        thread_bytes = Indexer.thread_scratch_bytes(indexer.spec, indexer.max_context, team.num_threads)
        self._scratch = aligned_bytes(thread_bytes * team.num_threads)
        self._frame["scratch"], self._frame["num_scratches"] = self._scratch.ctypes.data, team.num_threads
        self._frame["scratch_bytes"] = thread_bytes

    def __call__(
        self, h: F32Array, sources: F32Array, weights: IndexerWeights, keys: IndexKeys, layer_idx: int, batch: Batch
    ) -> list[NDArray[np.int32]]:
        """Positions that each row reads, ascending; h [T, D] and sources [T, query_rank] float32; its keys go to the cache."""
        self._frame["index"] = self.indexer.frame(weights, keys, layer_idx, batch)
        self._frame["h"], self._frame["h_stride"] = h.ctypes.data, h.strides[0]
        self._frame["sources"], self._frame["sources_stride"] = sources.ctypes.data, sources.strides[0]
        self._team.run(STAGE, self._frame)
        chosen = self.indexer.choice(batch).chosen
        if chosen is None:
            return [np.arange(position + 1, dtype=np.int32) for position in batch.positions.tolist()]
        return [row[:count].copy() for row, count in zip(chosen.positions, chosen.counts.tolist(), strict=True)]
