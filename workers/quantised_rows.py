"""Rows that are quantised between disk and slab (`--expert-bits`), in the I/O thread that has read them.

    scratch ─▶ some rows at a time: values as float32 ─▶ codes, scales, biases ─▶ packed ─▶ slab

The bytes of the slab are those that `convert --bits` would have made (`recoding`), wherever rows are cut: groups lie within
rows. It takes much longer than reading, so what is asked for often is better converted once.
"""

import math
from collections.abc import Sequence

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.errors import ReadError
from colibri_mp.kernels.layout import BLOCK_ROWS, Bytes, packed_bytes
from colibri_mp.recoding import Recoding, recode_rows
from colibri_mp.workers.read_plan import MatrixRows

_STEP_VALUES = 1 << 16
_BYTES_A_VALUE = 16  # as float32, and on the way there and to codes


def quantising_bytes(layer: ExpertLayer) -> int:
    """Memory that a thread needs at most beside its scratch buffer, while it quantises; 0 if this layer's experts are kept."""
    if layer.targets is None:
        return 0
    return max(_step_rows(cols) * cols * _BYTES_A_VALUE for cols in (layer.hidden, layer.width))


def quantise_rows(matrix: MatrixRows, parts: Sequence[Bytes], out: Bytes) -> None:
    """Quantise stored `parts` of rows to `matrix.target` and pack them into `out` (uint8 [matrix.packed_bytes]).

    Raises `ReadError` for values that are not finite.
    """
    recoding, target, cols = Recoding(matrix.encoding, matrix.target, "as asked"), matrix.target.format, matrix.cols
    step = _step_rows(cols)
    for first in range(0, matrix.rows, step):
        num_rows = min(step, matrix.rows - first)
        some = matrix.encoding.take_rows(parts, cols, first, num_rows)
        start = packed_bytes(target, first, cols)
        cost = recode_rows(recoding, num_rows, cols, some, out[start : start + packed_bytes(target, num_rows, cols)])
        if cost is not None and not math.isfinite(cost.squared_weights):
            raise ReadError(
                "weights that are not finite, or above 1e18, cannot be quantised; fetch the checkpoint again, or launch "
                "without --expert-bits"
            )


def _step_rows(cols: int) -> int:
    """Whole row blocks of the packed layout, of about `_STEP_VALUES` values."""
    return max(_STEP_VALUES // cols // BLOCK_ROWS, 1) * BLOCK_ROWS
