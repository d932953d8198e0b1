"""The rows of a step between two matrices, as stages keep them."""

from colibri_mp.kernels.layout import num_blocks
from colibri_mp.kernels.linear import row_table
from colibri_mp.kernels.team import aligned_bytes


class RowBuffer:
    """A buffer of `num_rows` rows with room for `width` values, padded to whole vectors, and the table of its rows."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.stride = num_blocks(width) * 64
        self.data = aligned_bytes(num_rows * self.stride)
        self.table = row_table(self.data.ctypes.data, self.stride, num_rows)
