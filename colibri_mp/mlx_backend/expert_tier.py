"""Experts on the device: a tier above the pool of slabs in shared memory, for the layers of one shape.

    slab (packed, shared memory) ── copy, transpose ──▶ a slot of the banks [slots, rows, ...], from which `mx.gather_qmm` reads

An expert must have a slot to be computed with. The one with the least weight gives way (`shm.policy.Lrfu`, as in the pool):
what comes by once is the next to go, what is asked for again and again stays. What is here is in the pool too, or
was: a hit saves the way to the device, never a read.
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.mlx_backend.slabs import SlabMatrix
from colibri_mp.shm.policy import HALF_LIFE_TOKENS, Lrfu

Bytes = NDArray[np.uint8]


class Bank:
    """One matrix of every slot."""

    def __init__(self, matrix: SlabMatrix, num_slots: int) -> None:
        self._matrix = matrix
        self._arrays = [mx.zeros((num_slots, *shape), dtype) for shape, dtype in matrix.shapes()]
        mx.eval(self._arrays)

    def put(self, slot: int, slab: Bytes) -> None:
        """Bring the matrix from a slab into a slot; in place, and complete when this returns."""
        for bank, array in zip(self._arrays, self._matrix.unpack(slab), strict=True):
            bank[slot] = array
        mx.eval(self._arrays)

    def multiply(self, x: mx.array, rows: mx.array, slots: mx.array) -> mx.array:
        """x [T, 1, cols]; row i of the result [R, 1, rows] is x[rows[i]] W[slots[i]]^T."""
        if not self._matrix.mode:
            weight = self._arrays[0].swapaxes(1, 2)
            return mx.gather_mm(x, weight, lhs_indices=rows, rhs_indices=slots)
        weight, scales = self._arrays[:2]
        biases = self._arrays[2] if self._matrix.mode == "affine" else None
        return mx.gather_qmm(
            x, weight, scales, biases, lhs_indices=rows, rhs_indices=slots, transpose=True,
            group_size=self._matrix.format.group_size, bits=self._matrix.bits, mode=self._matrix.mode,
        )  # fmt: skip


class ExpertTier:
    """The experts of some layers of one shape, in `num_slots` slots, no more than there are experts. One thread calls it.

    `num_experts`: of each layer.
    """

    def __init__(self, shape: ExpertShape, num_experts: Mapping[int, int], num_slots: int, top_k: int) -> None:
        total = sum(num_experts.values())
        self.shape, self.num_slots = shape, min(num_slots, total)
        self.num_hits = self.num_uploads = 0
        self.gate, self.up, self.down = (Bank(matrix, self.num_slots) for matrix in matrices(shape))
        self.biases = [mx.zeros((self.num_slots, size)) for size in bias_sizes(shape)]
        starts = accumulate(num_experts.values(), initial=0)
        self._first_key = dict(zip(num_experts, starts, strict=False))
        self._slot_of: dict[int, int] = {}
        self._free = list(range(self.num_slots))
        self._policy = Lrfu(total, HALF_LIFE_TOKENS * top_k * len(num_experts))

    def place(self, layer: int, experts: Sequence[int], addresses: NDArray[np.int64]) -> list[int]:
        """The slots of distinct experts, `num_slots` at most, whose slabs are at `addresses`; until the next call."""
        assert len(experts) <= self.num_slots
        keys = [self._first_key[layer] + expert for expert in experts]
        self._policy.used(keys)
        for key in keys:
            self._policy.pop(key, None)  # not to be evicted for the others
        for key, address in zip(keys, addresses.tolist(), strict=True):
            if key in self._slot_of:
                self.num_hits += 1
            else:
                self._upload(key, address)
        for key in keys:
            self._policy[key] = None
        return [self._slot_of[key] for key in keys]

    def _upload(self, key: int, address: int) -> None:
        slot = self._free.pop() if self._free else self._slot_of.pop(self._policy.evict())
        slab = np.ctypeslib.as_array((ctypes.c_uint8 * self.shape.slab_bytes).from_address(address))
        for bank in (self.gate, self.up, self.down):
            bank.put(slot, slab)
        offsets = self.shape.bias_offsets
        for bias, size, offset in zip(self.biases, bias_sizes(self.shape), offsets, strict=bool(self.biases)):
            bias[slot] = mx.array(slab[offset : offset + 4 * size].view(np.float32))
        mx.eval(self.biases)
        self._slot_of[key] = slot
        self.num_uploads += 1


def matrices(shape: ExpertShape) -> tuple[SlabMatrix, SlabMatrix, SlabMatrix]:
    """Gate, up and down of a slab."""
    return (
        SlabMatrix(shape.gate, shape.width, shape.hidden, shape.gate_offset),
        SlabMatrix(shape.up, shape.width, shape.hidden, shape.up_offset),
        SlabMatrix(shape.down, shape.hidden, shape.width, shape.down_offset),
    )


def bias_sizes(shape: ExpertShape) -> tuple[int, ...]:
    """Elements of the biases of gate, up and down, if there are any."""
    return (shape.width, shape.width, shape.hidden) if shape.has_bias else ()


def slot_bytes(shape: ExpertShape) -> int:
    """What an expert takes on the device, for the memory plan."""
    return sum(matrix.device_bytes for matrix in matrices(shape)) + 4 * sum(bias_sizes(shape))


def tier_slots(num_experts: Mapping[ExpertShape, int], device_bytes: int) -> dict[ExpertShape, int]:
    """The slots of a tier for each shape: shares of `device_bytes` in proportion to what its experts take, one slot at least."""
    whole = {shape: count * slot_bytes(shape) for shape, count in num_experts.items()}
    share = min(1.0, device_bytes / sum(whole.values()))
    return {shape: max(1, int(count * share)) for shape, count in num_experts.items()}
