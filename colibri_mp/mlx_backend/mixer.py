"""What MLX needs of a mixer: of what a layer does before its experts.

A new kind is a file beside `attention`, and a line in `mixers.KINDS`.
"""

from typing import NamedTuple, Protocol

import mlx.core as mx

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray
from colibri_mp.mlx_backend.matrices import Matrix


class Room(NamedTuple):
    """What mixers are made for."""

    num_blocks: int
    num_state_slots: int


class Mixer(Protocol):
    """The mixer of one layer, with its weights and what it keeps of positions and sequences."""

    paged: tuple[PagedArray, ...]
    states: tuple[SlotArray, ...]

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x [T, D] -> x + mixer(norm(x))."""


class WeightReader(Protocol):
    """Reads weights from a checkpoint to the device. Raises ReadError."""

    def matrix(self, stored: StoredMatrix) -> Matrix:
        """A matrix."""

    def vector(self, info: TensorInfo) -> mx.array:
        """A vector as float32."""

    def optional(self, info: TensorInfo | None) -> mx.array | None:
        """The same; None where there is none."""
