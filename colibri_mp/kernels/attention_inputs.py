"""What a call of the attention stage is given: the weights of a block, and the rows of a step."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.specs import AttentionSpec

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of one attention block. Vectors are C-contiguous float32; those that the spec lacks are None.

    norm [D]; q [num_heads * head_dim, D] (a gate's rows follow), k and v [num_kv_heads * head_dim, D], o [D, num_heads * head_dim];
    q_norm and k_norm [head_dim] for "head", [rows of q], [rows of k] for "full"; sinks [num_heads]. `window`: of this layer, where
    layers differ in it alone; None: that of the spec.
    """

    norm: F32Array
    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    q_bias: F32Array | None = None
    k_bias: F32Array | None = None
    v_bias: F32Array | None = None
    o_bias: F32Array | None = None
    q_norm: F32Array | None = None
    k_norm: F32Array | None = None
    sinks: F32Array | None = None
    window: int | None = None

    def check(self, spec: AttentionSpec) -> None:
        """Our own invariant: the loader has compared the checkpoint with its configuration."""
        rows = {"q": spec.q_rows, "k": spec.kv_width, "v": spec.kv_width, "o": spec.hidden}
        for name, matrix in (("q", self.q), ("k", self.k), ("v", self.v), ("o", self.o)):
            shape = (rows[name], spec.q_width if name == "o" else spec.hidden)
            assert (matrix.rows, matrix.cols) == shape, f"{name} is [{matrix.rows}, {matrix.cols}], not {shape}"
        norm_widths = {"none": (0, 0), "head": (spec.head_dim, spec.head_dim), "full": (spec.q_width, spec.kv_width)}
        q_norm, k_norm = norm_widths[spec.qk_norm]
        widths = {"norm": spec.hidden, "q_norm": q_norm, "k_norm": k_norm, "o_bias": spec.hidden * spec.o_bias}
        widths |= {"sinks": spec.num_heads * spec.sinks}
        widths |= {"q_bias": spec.q_width * spec.qkv_bias}
        widths |= {"k_bias": spec.kv_width * spec.qkv_bias, "v_bias": spec.kv_width * spec.qkv_bias}
        for name, width in widths.items():
            vector = getattr(self, name)
            assert (0 if vector is None else vector.size) == width, f"{name} must have {width} elements"
            if vector is not None:
                check_plain(vector, np.float32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step. All int32, C-contiguous.

    positions [T]: of each row in its sequence; sequence_idx [T]: its row of the block table;
    block_table [S, max_blocks]: id of the block that holds the positions 16 * i .. 16 * i + 15 (entries beyond are not read).
    state_runs [N, 4], for models with recurrent states: first row, number of rows, the slot that holds the state before them (-1:
    zeros, a sequence begins) and the slot for the state after them, which may be the same. Runs cover the rows in order; those of one
    sequence follow each other, and the next may start from the slot that the one before ends in.
    Rows of a sequence come in ascending order of position; consecutive ones next to each other share work.
    The arrays stay as they are while the batch is in use: a stage plans once for all layers.
    """

    positions: I32Array
    sequence_idx: I32Array
    block_table: I32Array
    state_runs: I32Array = field(default_factory=lambda: np.zeros((0, 4), np.int32))

    def __post_init__(self) -> None:
        for array in (self.positions, self.sequence_idx, self.block_table, self.state_runs):
            check_plain(array, np.int32)
        assert self.positions.shape == self.sequence_idx.shape
        assert self.block_table.ndim == 2


@dataclass(frozen=True, eq=False)
class Chosen:
    """Positions that each row of a step reads, where it is not all before it: int32 [T, most], ascending, and how many [T]."""

    positions: I32Array
    counts: I32Array

    def __post_init__(self) -> None:
        check_plain(self.positions, np.int32)
        check_plain(self.counts, np.int32)
        assert self.counts.shape == self.positions.shape[:1]


def check_plain(array: NDArray[Any], dtype: type) -> None:
    """Our own invariant: compiled code is given this type, C-contiguous."""
    assert array.dtype == dtype, f"{array.dtype} instead of {dtype.__name__}"
    assert array.flags.c_contiguous, "must be C-contiguous"
