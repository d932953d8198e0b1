"""How the pieces of a stored expert are to be taken apart into gate, up and down.

    separate      gate, up and down have pieces of their own, rows one after the other, as packers want them
    interleaved   gate and up share pieces, their rows alternate: g0 u0 g1 u1 ... (gpt_oss in MXFP4)
    transposed    the same by columns: gate_up [D, 2F], columns g0 u0 g1 u1 ..., and down [F, D] (gpt_oss in bf16)

Biases, of which there are none or three, come after the matrices; where gate and up share pieces, their biases do.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Arrangement = Literal["separate", "interleaved", "transposed"]
Bytes = npt.NDArray[np.uint8]


class Source(NamedTuple):
    """Where the parts of a projection, or a bias, lie: in the pieces from `first_piece` on, every `step`-th row from `first` on."""

    first_piece: int
    first: int = 0
    step: int = 1
    is_transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are what packers want."""
        return self.step == 1 and not self.is_transposed


def matrix_sources(arrangement: Arrangement, num_parts: tuple[int, int, int]) -> tuple[Source, Source, Source]:
    """Of gate, up and down, which have so many parts each."""
    gate, up, _ = num_parts
    if arrangement == "separate":
        return Source(0), Source(gate), Source(gate + up)
    is_transposed = arrangement == "transposed"
    return (
        Source(0, 0, 2, is_transposed),
        Source(0, 1, 2, is_transposed),
        Source(gate, is_transposed=is_transposed),
    )


def bias_sources(arrangement: Arrangement, num_parts: tuple[int, int, int]) -> tuple[Source, Source, Source]:
    """Of the biases of gate, up and down."""
    gate, up, down = num_parts
    if arrangement == "separate":
        start = gate + up + down
        return Source(start), Source(start + 1), Source(start + 2)
    start = gate + down
    return Source(start, 0, 2), Source(start, 1, 2), Source(start + 1)


def take_rows(source: Source, rows: int, cols: int, part: Bytes) -> Bytes:
    """`rows` rows of one part of a matrix, contiguous; `cols` of the matrix.

    part: the stored bytes of those rows and of the ones between them; of a transposed matrix, all of it, unquantised.
    """
    if source.is_plain:
        return part
    if not source.is_transposed:
        return part.reshape(rows, source.step, -1)[:, source.first].reshape(-1)
    elements = part.reshape(cols, rows, source.step, -1)[:, :, source.first]
    kind = {2: np.uint16, 4: np.uint32}[elements.shape[-1]]
    columns = np.ascontiguousarray(elements).view(kind)[..., 0]
    return np.ascontiguousarray(columns.T).view(np.uint8).reshape(-1)
