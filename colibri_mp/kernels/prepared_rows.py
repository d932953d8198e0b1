"""Buffers of prepared rows (see `linear`): what the matrices of a stage read of the rows of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.linear import describe, row_table
from colibri_mp.kernels.team import aligned_bytes


def largest_prepared(cols: int) -> int:
    """Upper limit of the bytes of a prepared row of `cols` values, whatever the format."""
    return cols * 9 // 2 + 64


class PreparedRows:
    """Room for `num_rows` rows of at most `cols` values in each form that the matrices of a layer mix; made when first asked for."""

    def __init__(self, num_rows: int, cols: int) -> None:
        self._num_rows, self._row_bytes = num_rows, largest_prepared(cols)
        self._buffers: list[NDArray[np.uint8]] = []
        self._tables: dict[tuple[int, int], NDArray[np.int64]] = {}

    def bind(self, frame: NDArray[np.void], weights: Any, names: Sequence[str], planes: int) -> None:
        """Describe the matrices `names` of a layer in its frame, and give each a buffer: `*_matrix`, `*_prepared`, `*_xs`.

        Equal forms share a buffer, and the last matrix, which reads what the others gave, takes the first when it is done.
        """
        slots: dict[tuple[int, int], int] = {}
        for name in names:
            matrix = describe(getattr(weights, name), planes)
            row_bytes = int(matrix["prepared_bytes"][0])
            form = (int(matrix["form"][0]), row_bytes)
            slot = 0 if name == names[-1] else slots.setdefault(form, len(slots))
            frame[f"{name}_matrix"], frame[f"{name}_prepared"] = matrix, self._buffer(slot).ctypes.data
            frame[f"{name}_xs"] = self._table(slot, row_bytes).ctypes.data

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All that is allocated by now."""
        return [*self._buffers, *self._tables.values()]

    def _buffer(self, slot: int) -> NDArray[np.uint8]:
        if slot == len(self._buffers):
            self._buffers.append(aligned_bytes(self._num_rows * self._row_bytes))
        return self._buffers[slot]

    def _table(self, slot: int, row_bytes: int) -> NDArray[np.int64]:
        """Addresses of the rows of a buffer, of this size."""
        if (slot, row_bytes) not in self._tables:
            self._tables[slot, row_bytes] = row_table(self._buffer(slot).ctypes.data, row_bytes, self._num_rows)
        return self._tables[slot, row_bytes]
