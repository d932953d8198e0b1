"""What a call of the gated delta net is given beside the rows of a step: the weights of a block, and the states of sequences.

A *state* is what a sequence has in place of a cache, all layers together: for each layer and value head a matrix [key_dim, value_dim],
and the last inputs of the convolution. Its size does not depend on the length of the sequence. It lies in a *slot*:

    states  float32 [layers][slots][value heads][P / 32][key_dim][32 values]      P = value_dim rounded up to 32, zeros beyond
    tails   float32 [layers][slots][conv_tokens - 1][conv_width]                  the oldest first, before the convolution

`Batch.state_runs` says what a step does with slots: rows that continue the state of one slot, and the slot that the state after them
goes to. So nothing is copied or cleared beforehand, a state can be kept (by going on in another slot), and a state that a step spoils
by failing is never one that somebody else counts on.

To compute rows that may have to be taken back (drafts), let their run go on in another slot than the one it starts from: the state
before them stays in the first. If some are refused, compute the accepted ones again from that slot (a run of few rows; their weights are
read once more), or cut the run after every row that may be the last: each piece ends in a slot of its own and nothing is computed twice.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import MemoryPlanError
from colibri_mp.kernels.attention_inputs import check_plain
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.specs import DeltaNetSpec

F32Array = NDArray[np.float32]

TILE_VALUES = 32
"""Elements of a value head that are computed together: two vectors."""


@dataclass(frozen=True, eq=False)
class DeltaNetWeights:
    """Weights of one gated delta net. Vectors are C-contiguous float32.

    norm [D]; qkv [conv_width, D]: all query heads, then all key heads, then all value heads; z [value_width, D]; out [D, value_width];
    b and a [value heads, D]; conv [conv_tokens, conv_width], the last is of the current token; rate [value heads]: -exp(A_log);
    dt_bias [value heads]; head_norm [value_dim].
    """

    norm: F32Array
    qkv: PackedMatrix
    z: PackedMatrix
    b: PackedMatrix
    a: PackedMatrix
    out: PackedMatrix
    conv: F32Array
    rate: F32Array
    dt_bias: F32Array
    head_norm: F32Array

    def check(self, spec: DeltaNetSpec) -> None:
        """Our own invariant: the loader has compared the checkpoint with its configuration."""
        heads = spec.num_value_heads
        rows = {"qkv": spec.conv_width, "z": spec.value_width, "b": heads, "a": heads, "out": spec.hidden}
        for name, num_rows in rows.items():
            matrix: PackedMatrix = getattr(self, name)
            shape = (num_rows, spec.value_width if name == "out" else spec.hidden)
            assert (matrix.rows, matrix.cols) == shape, f"{name} is [{matrix.rows}, {matrix.cols}], not {shape}"
        shapes = {"norm": (spec.hidden,), "conv": (spec.conv_tokens, spec.conv_width), "head_norm": (spec.value_dim,)}
        for name, vector_shape in {**shapes, "rate": (heads,), "dt_bias": (heads,)}.items():
            vector: F32Array = getattr(self, name)
            assert vector.shape == vector_shape, f"{name} is {vector.shape}, not {vector_shape}"
            check_plain(vector, np.float32)


class DeltaStates:
    """States of `num_slots` slots for `num_layers` layers of one shape; see the module docstring. Owned by this object."""

    def __init__(self, spec: DeltaNetSpec, num_layers: int, num_slots: int) -> None:
        self.spec, self.num_layers, self.num_slots = spec, num_layers, num_slots
        num_bytes = self.nbytes(spec, num_layers, num_slots)
        try:
            self._memory = np.zeros(num_bytes // 4 + 16, np.float32)
        except MemoryError as error:
            raise MemoryPlanError(f"no memory for recurrent states of {num_bytes} bytes") from error
        start = -self._memory.ctypes.data % 64 // 4
        values = self._memory[start : start + num_bytes // 4]
        state_floats = num_layers * num_slots * _state_floats(spec)
        shape = (num_layers, num_slots, spec.num_value_heads, num_tiles(spec), spec.key_dim, TILE_VALUES)
        self.states: F32Array = values[:state_floats].reshape(shape)
        self.tails: F32Array = values[state_floats:].reshape(num_layers, num_slots, -1, spec.conv_width)
        self._addresses = (int(self.states.ctypes.data), int(self.tails.ctypes.data))

    @staticmethod
    def nbytes(spec: DeltaNetSpec, num_layers: int, num_slots: int) -> int:
        """Bytes of the states, for the memory plan."""
        return 4 * num_layers * num_slots * (_state_floats(spec) + (spec.conv_tokens - 1) * spec.conv_width)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self.nbytes(self.spec, self.num_layers, 1)

    def addresses(self, layer_idx: int) -> tuple[int, int]:
        """Of a layer's first state and first tail, for compiled code; valid as long as this object."""
        states, tails = self._addresses
        return states + layer_idx * self.states.strides[0], tails + layer_idx * self.tails.strides[0]

    def copy_slot(self, slot: int) -> NDArray[np.uint8]:
        """The state in a slot, [layers] states and then [layers] tails, as uint8 [slot_bytes]."""
        parts = (self.states[:, slot], self.tails[:, slot])
        return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in parts]).view(np.uint8)

    def set_slot(self, slot: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_slot`."""
        values, cut = np.frombuffer(data, np.float32), self.states[:, slot].size
        self.states[:, slot] = values[:cut].reshape(self.states[:, slot].shape)
        self.tails[:, slot] = values[cut:].reshape(self.tails[:, slot].shape)


def num_tiles(spec: DeltaNetSpec) -> int:
    """Tiles of a value head."""
    return -(-spec.value_dim // TILE_VALUES)


def _state_floats(spec: DeltaNetSpec) -> int:
    return spec.num_value_heads * num_tiles(spec) * spec.key_dim * TILE_VALUES
