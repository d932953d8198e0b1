"""What MLX needs of a mixer: of what a layer does before its experts.

A new kind is a file beside `attention`, and a line in `mixers.KINDS`.
"""

from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.mlx_backend.kv_cache import PagedArray, SlotArray
from colibri_mp.mlx_backend.matrices import Matrix

Mask = NDArray[np.bool_]


class Choice:
    """What an indexer has chosen in the step under way, for layers without one of their own: of each run which positions its rows read."""

    def __init__(self) -> None:
        self.masks: list[Mask] = []


class Room(NamedTuple):
    """What mixers are made for, all with the same `choice`."""

    num_blocks: int
    num_state_slots: int
    choice: Choice


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
