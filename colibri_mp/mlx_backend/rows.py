"""What several parts of a layer need of rows: norms, rotary embedding, and which rows of a step are of one sequence."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.mlx_backend.device import to_device


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last axis, float32."""
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


class Rope:
    """The tables of `kernels.rope` on the device: one definition of every kind of rotary embedding."""

    def __init__(self, tables: RopeTables) -> None:
        self._half = tables.rotary_dim // 2
        self._cos, self._sin = to_device(tables.cos), to_device(tables.sin)
        mx.eval(self._cos, self._sin)

    def __call__(self, heads: mx.array, positions: mx.array) -> mx.array:
        """[T, heads, head_dim]: pairs (i, i + rotary_dim / 2) turned by the angle of their position [T]; the rest is left alone."""
        half = self._half
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return mx.concatenate([*self._turned(first, second, positions), rest], axis=-1)

    def neighbours(self, heads: mx.array, positions: mx.array) -> mx.array:
        """The same for pairs (2i, 2i + 1). Of the turned pairs the first elements come first, then the second ones, then the rest."""
        width = 2 * self._half
        first, second, rest = heads[..., 0:width:2], heads[..., 1:width:2], heads[..., width:]
        return mx.concatenate([*self._turned(first, second, positions), rest], axis=-1)

    def _turned(self, first: mx.array, second: mx.array, positions: mx.array) -> list[mx.array]:
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        return [first * cos - second * sin, second * cos + first * sin]


def blocks_of(batch: Batch) -> NDArray[np.int32]:
    """The block of each row's position [T]."""
    return batch.block_table[batch.sequence_idx, batch.positions // BLOCK_TOKENS]


class Run(NamedTuple):
    """Rows first ... end of a step, of one sequence, at consecutive positions from `position` on."""

    first: int
    end: int
    sequence: int
    position: int


def runs(batch: Batch) -> Iterator[Run]:
    """The rows of a step by sequence."""
    same = (np.diff(batch.sequence_idx) == 0) & (np.diff(batch.positions) == 1)
    starts = [0, *(np.flatnonzero(~same) + 1).tolist(), len(batch.positions)]
    for first, end in pairwise(starts):
        yield Run(first, end, int(batch.sequence_idx[first]), int(batch.positions[first]))
