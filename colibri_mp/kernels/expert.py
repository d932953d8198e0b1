"""SwiGLU experts of one layer: y[t] = sum over the chosen experts e of weight * down_e(silu(gate_e x) * up_e x).

Some have biases, and another activation (`layout.ExpertShape`); the weight multiplies what comes after the bias of down.

    begin(x, ids, weights)        list the (token, choice) pairs by expert: *rows*; prepare x
    compute(expert_ids, slabs)    any of the step's experts, in any order and any number of calls; one compiled call each:
                                      phase 0   chunk = some hidden columns of an expert, for all its rows:
                                                gate, up, silu(gate) * up, prepared for down
                                      phase 1   chunk = some output blocks of an expert, for all its rows: partial results [row, D]
    finish(out)                   out[t] = sum of weight * partial over the token's rows, in ascending expert id

    run(...)                      all three as one compiled call, when every expert of the step is there

A row's partial result is the same whatever else is in the batch, and the sum has one order, so that neither batching nor the order
in which experts arrive changes a bit. The compiled part is `expert_stages`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels import activations, layout
from colibri_mp.kernels.expert_stages import (
    COMBINE_STAGE,
    COMPUTE_STAGE,
    PREPARE_STAGE,
    ROWS_PER_PASS,
    STEP_FRAME,
    STEP_STAGE,
    TOKENS_PER_CHUNK,
    count_rows,
)  # fmt: skip
from colibri_mp.kernels.layout import BLOCK_ROWS, ExpertShape
from colibri_mp.kernels.linear import DEFAULT_PLANES, describe_format, row_table
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes

COLUMNS_PER_CHUNK = 64
"""Hidden columns of a chunk of phase 0, at least: it is a multiple of the group size."""
ALONE_BYTES = 1 << 18
"""Weights times tokens below which a call wakes no helper: some 10 us of work."""


def _check(array: npt.NDArray[Any], shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    """Compiled code believes what it is told."""
    assert array.shape == shape, f"an array of shape {array.shape} instead of {shape}"
    assert array.dtype == dtype, f"an array of {array.dtype} instead of {dtype.__name__}"
    assert array.flags.c_contiguous, "an array that is not C-contiguous"


class _Sizes:
    """Sizes of the buffers of a stage, bytes where not said."""

    def __init__(self, shape: ExpertShape, max_tokens: int, top_k: int, planes: int) -> None:
        self.max_tokens, self.rows = max_tokens, max_tokens * top_k
        group = activations.form(shape.down) or COLUMNS_PER_CHUNK
        self.chunk_columns = -(-COLUMNS_PER_CHUNK // group) * group
        self.for_gate = activations.prepared_bytes(shape.gate, shape.hidden, planes)
        self.for_up = activations.prepared_bytes(shape.up, shape.hidden, planes)
        self.inputs_shared = activations.form(shape.gate) == activations.form(shape.up)
        self.hidden = activations.prepared_bytes(shape.down, shape.width, planes)
        self.partial = layout.num_blocks(shape.hidden) * BLOCK_ROWS * 4
        self.chunk_prepared = activations.prepared_bytes(shape.down, self.chunk_columns * 8, planes) // 8
        self.thread = 2 * ROWS_PER_PASS * (8 + 4 * self.chunk_columns)

    def total(self, num_threads: int) -> int:
        """All buffers; tables by row: 7 of int64 and one of float32; by token: one of int64."""
        inputs = self.for_gate + (0 if self.inputs_shared else self.for_up)
        return (
            self.max_tokens * (inputs + 8)
            + self.rows * (self.hidden + self.partial + 7 * 8 + 4)
            + num_threads * self.thread
        )


def scratch_bytes(
    shape: ExpertShape, max_tokens: int, top_k: int, planes: int = DEFAULT_PLANES, num_threads: int = 16
) -> int:
    """Bytes that an `ExpertStage` allocates, but for a few KiB; for the memory plan."""
    return _Sizes(shape, max_tokens, top_k, planes).total(num_threads)


class ExpertStage:
    """The experts 0 .. num_experts - 1 of layers of one shape; owns its buffers (`scratch_bytes`). Calls: see the module docstring."""

    def __init__(
        self,
        team: ThreadTeam,
        shape: ExpertShape,
        num_experts: int,
        max_tokens: int,
        top_k: int,
        planes: int = DEFAULT_PLANES,
    ) -> None:
        self.shape, self.max_tokens, self.top_k = shape, max_tokens, top_k
        self._team = team
        self._sizes = sizes = _Sizes(shape, max_tokens, top_k, planes)
        self._for_gate = aligned_bytes(max_tokens * sizes.for_gate)
        self._for_up = self._for_gate if sizes.inputs_shared else aligned_bytes(max_tokens * sizes.for_up)
        self._hidden, self._partial = (
            aligned_bytes(sizes.rows * sizes.hidden),
            aligned_bytes(sizes.rows * sizes.partial),
        )
        self._scratch = aligned_bytes(team.num_threads * sizes.thread)
        self._tables = np.zeros((5, sizes.rows), np.int64)  # gate_rows, up_rows, token_of, choice_of, row_of
        self._weight_of, self._counts = np.zeros(sizes.rows, np.float32), np.zeros(max_tokens, np.int64)
        self._hidden_rows = row_table(self._hidden.ctypes.data, sizes.hidden, sizes.rows)
        self._partial_rows = row_table(self._partial.ctypes.data, sizes.partial, sizes.rows)
        self._num_rows = np.zeros(1, np.int64)
        self._rows_done = self._num_tokens = 0
        self._starts, self._next_row = np.zeros((2, num_experts + 1), np.int64)
        self._expert_ids, self._slabs = np.zeros(num_experts, np.int32), np.zeros(num_experts, np.int64)
        self._frame = np.zeros(1, STEP_FRAME)
        self._prepare, self._compute, self._combine = (self._frame[name] for name in ("prepare", "compute", "combine"))
        self._describe_matrices(planes)
        self._point_to_buffers()

    def _describe_matrices(self, planes: int) -> None:
        shape, compute = self.shape, self._compute
        for name, kind in (("gate", shape.gate), ("up", shape.up)):
            self._prepare[name] = compute[name] = describe_format(kind, shape.width, shape.hidden, planes)
        compute["down"] = describe_format(shape.down, shape.hidden, shape.width, planes)
        compute["up_offset"], compute["down_offset"] = shape.up_offset, shape.down_offset
        if shape.has_bias:
            compute["gate_bias"], compute["up_bias"], compute["down_bias"] = shape.bias_offsets
        if shape.clamp is not None:
            compute["limit"], compute["alpha"] = shape.clamp.limit, shape.clamp.alpha
        compute["chunk_columns"], compute["chunk_prepared_bytes"] = (
            self._sizes.chunk_columns,
            self._sizes.chunk_prepared,
        )
        self._prepare["top_k"] = self._combine["top_k"] = self.top_k
        self._combine["hidden"] = shape.hidden

    def _point_to_buffers(self) -> None:
        buffers: dict[str, npt.NDArray[Any]] = dict(
            zip(("gate_rows", "up_rows", "token_of", "choice_of", "row_of"), self._tables, strict=True),
            for_gate=self._for_gate, for_up=self._for_up, weight_of=self._weight_of, counts=self._counts, num_rows=self._num_rows,
            hidden_rows=self._hidden_rows, partial_rows=self._partial_rows, scratch=self._scratch,
            starts=self._starts, next_row=self._next_row, expert_ids=self._expert_ids, slabs=self._slabs,
        )  # fmt: skip
        for frame in (self._prepare, self._compute, self._combine):
            for name in buffers.keys() & set(frame.dtype.names or ()):
                frame[name] = buffers[name].ctypes.data
        self._compute["scratch_bytes"], self._compute["num_threads"] = self._sizes.thread, self._team.num_threads
        self._prepare["num_ids"] = self._compute["num_ids"] = len(self._expert_ids)

    def begin(self, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        """Start a step: x float32 [T, D], ids int32 [T, K] (negative: not for us), weights float32 [T, K]; nothing of them is kept."""
        self._set_inputs(x, ids, weights)
        self._rows_done = 0
        self._team.run(PREPARE_STAGE, self._prepare, max_helpers=self._num_tokens // (2 * TOKENS_PER_CHUNK))
        assert self._num_rows[0] >= 0, f"an expert id in {ids} is not below {len(self._expert_ids)}"

    def compute(self, expert_ids: npt.NDArray[np.int32], slab_addresses: npt.NDArray[np.int64]) -> None:
        """Partial results of some experts: ids int32 [n], addresses int64 [n] of their slabs, 64-aligned, unchanged until this returns."""
        self._set_experts(expert_ids, slab_addresses)
        self._rows_done += count_rows(self._expert_ids, len(expert_ids), self._starts)
        self._team.run(COMPUTE_STAGE, self._compute, max_helpers=self._helpers_for(len(expert_ids), self._num_tokens))

    def finish(self, out: npt.NDArray[np.float32]) -> None:
        """out [T, D] = the weighted sums; every routed expert must have been computed, once."""
        self._check_complete()
        self._set_output(out)
        self._team.run(COMBINE_STAGE, self._combine, max_helpers=self._num_tokens // TOKENS_PER_CHUNK)

    def run(
        self,
        x: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        expert_ids: npt.NDArray[np.int32],
        slab_addresses: npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
    ) -> None:
        """`begin`, `compute` with all the experts of the step, and `finish`; the same bits."""
        self._set_inputs(x, ids, weights)
        self._set_experts(expert_ids, slab_addresses)
        self._set_output(out)
        self._team.run(STEP_STAGE, self._frame, max_helpers=self._helpers_for(len(expert_ids), self._num_tokens))
        self._rows_done = count_rows(self._expert_ids, len(expert_ids), self._starts)
        self._check_complete()

    def bind(
        self,
        x: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> "BoundStep":
        """`run` for arrays that stay where they are."""
        self._set_inputs(x, ids, weights)
        self._set_output(out)
        return BoundStep(self, (x, ids, weights, out))

    def _set_inputs(
        self, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]
    ) -> None:
        num_tokens = len(x)
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens, at most {self.max_tokens}"
        _check(x, (num_tokens, self.shape.hidden), np.float32)
        _check(ids, (num_tokens, self.top_k), np.int32)
        _check(weights, (num_tokens, self.top_k), np.float32)
        frame = self._prepare
        frame["x"], frame["ids"], frame["weights"] = x.ctypes.data, ids.ctypes.data, weights.ctypes.data
        frame["num_tokens"] = self._combine["num_tokens"] = self._num_tokens = num_tokens

    def _set_experts(self, expert_ids: npt.NDArray[np.int32], slab_addresses: npt.NDArray[np.int64]) -> None:
        num_experts = len(expert_ids)
        assert num_experts <= len(self._expert_ids), f"{num_experts} experts of {len(self._expert_ids)}"
        _check(expert_ids, (num_experts,), np.int32)
        _check(slab_addresses, (num_experts,), np.int64)
        self._expert_ids[:num_experts], self._slabs[:num_experts] = expert_ids, slab_addresses
        self._compute["num_experts"] = num_experts

    def _set_output(self, out: npt.NDArray[np.float32]) -> None:
        _check(out, (self._num_tokens, self.shape.hidden), np.float32)
        self._combine["out"] = out.ctypes.data

    def _check_complete(self) -> None:
        assert self._rows_done == self._num_rows[0], (
            f"{self._rows_done} of {self._num_rows[0]} (token, expert) rows were computed"
        )

    def _helpers_for(self, num_experts: int, num_tokens: int) -> int | None:
        """How many helpers to wake, None: all."""
        return 0 if num_experts * self.shape.nbytes * num_tokens < ALONE_BYTES else None


class BoundStep:
    """`ExpertStage.run` for arrays that stay where they are: all that changes from step to step is which experts. Made by `bind`."""

    def __init__(self, stage: ExpertStage, arrays: tuple[npt.NDArray[Any], ...]) -> None:
        self._stage, self._arrays = stage, arrays  # kept alive: the frame has their addresses
        self._frame = stage._frame.copy()
        self._num_experts = self._frame["compute"]["num_experts"]
        self._num_tokens = len(arrays[0])

    def run(self, expert_ids: Sequence[int], slab_addresses: npt.NDArray[np.int64]) -> None:
        """Ids of the distinct experts in the ids that are bound now, int64 [n] addresses of their slabs."""
        stage, num_experts = self._stage, len(expert_ids)
        stage._expert_ids[:num_experts], stage._slabs[:num_experts] = expert_ids, slab_addresses
        self._num_experts[0] = num_experts
        stage._team.run(STEP_STAGE, self._frame, max_helpers=stage._helpers_for(num_experts, self._num_tokens))
