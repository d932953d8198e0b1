"""h = norm(x), y = h W^T in one compiled stage: the head, and the first two phases of the router.

0  rows of x -> h (RMS norm) -> prepared rows
1  blocks of rows of W -> columns of y
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.jit import Native, compiled
from colibri_mp.kernels.layout import PackedMatrix, num_blocks
from colibri_mp.kernels.linear import MATRIX, blocks_per_chunk, describe, multiply_blocks, prepare_rows, row_table
from colibri_mp.kernels.norm import rms_norm_row
from colibri_mp.kernels.prepared_rows import largest_prepared
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes, barrier, done, take

F32Array = NDArray[np.float32]

_LINEAR_FIELDS = ("x", "num_rows", "width", "norm_weight", "h", "prepared", "xs", "y", "y_stride", "ys")
_ROUTER_FIELDS = (
    *("num_experts", "top_k", "renormalise", "probabilities", "ids", "expert_weights"),
    *("logit_bias", "correction", "is_sigmoid", "num_groups", "kept_groups", "group_scores"),
)
FRAME = np.dtype(
    [
        ("weight", MATRIX),
        *[(name, np.int64) for name in (*_LINEAR_FIELDS, *_ROUTER_FIELDS)],
        ("eps", np.float64),
        ("top_p", np.float64),
        ("scaling", np.float64),
    ]
)
"""Addresses, strides in bytes and counts; at the end what is neither."""

_ROWS_A_CHUNK = 4
_SMALL_WORK_BYTES = 256 * 1024


@compiled
def num_row_chunks(job: Any) -> int:
    """Chunks of a phase that goes over rows."""
    return int(job.num_rows + _ROWS_A_CHUNK - 1) // _ROWS_A_CHUNK


@compiled
def norm_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    """The first phase, under this number. False: the job is over, leave."""
    num_chunks = num_row_chunks(job)
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        first, last = chunk * _ROWS_A_CHUNK, min(job.num_rows, (chunk + 1) * _ROWS_A_CHUNK)
        for row in range(first, last):
            offset = row * job.width * 4
            rms_norm_row(job.x + offset, job.norm_weight, job.h + offset, job.width, np.float32(job.eps))
        prepare_rows(job.weight, job.h, job.width * 4, job.prepared, first, last)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


@compiled
def multiply_phase(job: Any, control: int, tag: int, phase: int) -> bool:
    """The second phase. False: the job is over, leave."""
    size = blocks_per_chunk(job.weight)
    num_chunks = (job.weight.num_blocks + size - 1) // size
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        last = min(job.weight.num_blocks, (chunk + 1) * size)
        multiply_blocks(job.weight, chunk * size, last, job.xs, job.ys, job.num_rows)
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    return barrier(control, tag, phase, num_chunks)


class NormedLinear:
    """Buffers for up to `max_rows` rows x [R, D] -> h [R, D], y [R, N], and the frames of a stage made of the phases above.

    Weights met in a call are kept (some kB each) until this object goes.
    """

    def __init__(self, width: int, num_outputs: int, norm_eps: float, max_rows: int, planes: int) -> None:
        self.width, self.num_outputs, self.max_rows, self._planes = width, num_outputs, max_rows, planes
        self.h: F32Array = aligned_bytes(max_rows * width * 4).view(np.float32).reshape(max_rows, width)
        self.y: F32Array = aligned_bytes(max_rows * num_blocks(num_outputs) * 64).view(np.float32).reshape(max_rows, -1)
        self._prepared = aligned_bytes(max_rows * largest_prepared(width))
        self._ys = row_table(self.y.ctypes.data, self.y.strides[0], max_rows)
        self._tables: dict[int, NDArray[np.int64]] = {}
        self._frames: dict[int, tuple[PackedMatrix, NDArray[np.void]]] = {}
        self.template = np.zeros(1, FRAME)
        self.template["width"], self.template["eps"], self.template["y_stride"] = width, norm_eps, self.y.strides[0]
        for name, buffer in (("h", self.h), ("prepared", self._prepared), ("y", self.y), ("ys", self._ys)):
            self.template[name] = buffer.ctypes.data

    @staticmethod
    def scratch_bytes(width: int, num_outputs: int, max_rows: int) -> int:
        """Bytes that an object of these sizes allocates, at most."""
        return max_rows * (width * 4 + num_blocks(num_outputs) * 64 + largest_prepared(width) + 40)

    def run(self, team: ThreadTeam, stage: Native, x: F32Array, norm: F32Array, weight: PackedMatrix) -> None:
        """Run a stage over rows x [R, D] with norm [D] and weight [N, D]; small work is not worth waking helpers."""
        is_small = x.shape[0] * weight.data.nbytes < _SMALL_WORK_BYTES
        team.run(stage, self.frame(x, norm, weight), max_helpers=0 if is_small else None)

    def frame(self, x: F32Array, norm: F32Array, weight: PackedMatrix) -> NDArray[np.void]:
        """The frame of a call of a stage, as for `run`; valid until the next call with this weight."""
        num_rows = x.shape[0]
        assert 1 <= num_rows <= self.max_rows
        assert x.shape == (num_rows, self.width), f"x is {x.shape}"
        assert norm.shape == (self.width,)
        assert x.dtype == norm.dtype == np.float32
        assert x.flags.c_contiguous
        frame = self.bound(weight)
        frame["x"], frame["num_rows"], frame["norm_weight"] = x.ctypes.data, num_rows, norm.ctypes.data
        return frame

    def bound(self, weight: PackedMatrix) -> NDArray[np.void]:
        """The frame for a weight matrix; made when it is first met."""
        if id(weight) not in self._frames:
            assert (weight.rows, weight.cols) == (self.num_outputs, self.width), f"W [{weight.rows}, {weight.cols}]"
            frame = self.template.copy()
            frame["weight"] = describe(weight, self._planes)
            stride = int(frame["weight"]["prepared_bytes"][0])
            xs = self._tables.setdefault(stride, row_table(self._prepared.ctypes.data, stride, self.max_rows))
            frame["xs"] = xs.ctypes.data
            self._frames[id(weight)] = (weight, frame)
        return self._frames[id(weight)][1]
