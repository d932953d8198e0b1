"""R16S: the packed form of weight matrices that the kernels read as one sequential stream.

A matrix [rows, cols] is cut into blocks of 16 rows (the last one padded with zero rows); in a block a vector lane is a row.

    q2 ... q8  block = cols / group records;  record = words u32 [group * bits / 32][16] | scales [16] | biases [16]
               value = code * scale + bias
               symmetric: without biases, value = (code - 8) * scale, of q8 (code - 128) * scale; scales float32
               row: the same, and the scales are float32 [16], once at the end of the block
    fp4, fp8   block = lines;  line = 64 bytes of scales | codes of the groups that they are for (fewer in the last line)
               scales: u8 [4 groups][16], or of tiles float32 [16 tiles]
               codes: fp4 words as those of q4, value = E2M1[code] * scale;  fp8 u8 [group / 2][16][2], value = E4M3[code] * scale
    bf16, f16, f32   block = elements [cols padded to 8 with zeros][16]

*Units*: unit 2i of a group is the codes of columns 8i+0,2,4,6, unit 2i+1 of 8i+1,3,5,7; each code is a byte, and the four bytes of a lane
meet the same four bytes of activations (`activations`). Words hold units in parts of 8, 4, 2 or 1 bits (`code_parts`): part word w of
width p holds units w * 8/p + j at bits p * j of each byte. So a q4 word is the codes of columns 8i..8i+7, low nibble first, as MLX stores
them; a q8 word is a unit; q3 has the low two bits of all units of its group, and then the high bits.

All parts of a record start at multiples of 16 bytes, all blocks of fp4 and fp8 and all matrices at multiples of 64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from colibri_mp.formats import ELEMENT_BYTES, Encoding, Format
from colibri_mp.specs import ClampedSwiGLU

LAYOUT_VERSION = "R16S-2"
"""Names these bytes; containers store it. To change a byte of the packed form is to change this."""
READABLE_LAYOUTS = ("R16S-1", LAYOUT_VERSION)
"""R16S-1 differs in what has codes of 2, 3, 5 and 6 bits, of FP4 and of FP8 only, and there in size: that is told by the sizes."""
BLOCK_ROWS = 16
DENSE_STEP = 8
"""Columns of a dense matrix are padded to a multiple of this, and computed so many at a time."""
LINE_BYTES = 64
"""Scales of fp4 and fp8 before the codes that they are for: everything is one stream, and words lie at multiples of 64."""
SLAB_ALIGNMENT = 4096

Bytes = npt.NDArray[np.uint8]


class Geometry(NamedTuple):
    """Sizes of the packed form for one row length."""

    num_steps: int
    """Groups of q2 ... q8 and fp4; of fp8 and dense formats steps of 8 columns."""
    step_bytes: int
    """Bytes from one step to the next: a whole record of q2 ... q8; of fp4, fp8 and where a row has one scale the codes alone."""
    block_bytes: int


_CODE_BITS: dict[str, int] = {"q2": 2, "q3": 3, "q4": 4, "q5": 5, "q6": 6, "q8": 8, "fp4": 4, "fp8": 8}
_PARTS: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


def code_bits(matrix_format: Format) -> int:
    """Bits of a code; 0 for dense formats."""
    return _CODE_BITS.get(matrix_format.kind, 0)


def code_parts(bits: int) -> tuple[int, ...]:
    """Widths of the parts in which words hold codes of so many bits, low bits first."""
    return _PARTS[bits]


def groups_a_line(matrix_format: Format) -> int:
    """Groups of fp4 or fp8 whose scales lie together before their codes; a power of two."""
    return LINE_BYTES // (4 if matrix_format.scale == "tile" else BLOCK_ROWS)


def uses_groups(matrix_format: Format) -> bool:
    """Whether products are made of integer codes, group by group (q2 ... q8, fp4); otherwise of floats."""
    return matrix_format.group_size > 0 and matrix_format.kind != "fp8"


def geometry(matrix_format: Format, cols: int) -> Geometry:
    """Sizes of a block. Raises ValueError when grouped columns do not divide into groups, or those of fp8 into steps."""
    kind, group, scale = matrix_format
    bits = code_bits(matrix_format)
    if not bits:
        steps, step_bytes = -(-cols // DENSE_STEP), DENSE_STEP * BLOCK_ROWS * ELEMENT_BYTES[kind]
        return Geometry(steps, step_bytes, steps * step_bytes)
    unit = DENSE_STEP if scale == "tile" else group
    if cols % unit:
        raise ValueError(f"{cols} columns do not divide into groups of {unit}")
    codes = cols * BLOCK_ROWS * bits // 8
    if scale == "row":
        return Geometry(cols // group, codes * group // cols, codes + 4 * BLOCK_ROWS)
    if kind in ("fp4", "fp8"):
        num_lines = -(-cols // (group * groups_a_line(matrix_format)))
        steps = cols // (group if kind == "fp4" else DENSE_STEP)
        return Geometry(steps, codes // steps, codes + LINE_BYTES * num_lines)
    step_bytes = BLOCK_ROWS * (group * bits // 8 + (4 if scale == "symmetric" else 2 * ELEMENT_BYTES[scale]))
    return Geometry(cols // group, step_bytes, cols // group * step_bytes)


def num_blocks(rows: int) -> int:
    """Blocks of 16 rows, the last one padded."""
    return -(-rows // BLOCK_ROWS)


def packed_bytes(matrix_format: Format, rows: int, cols: int) -> int:
    """Bytes of a packed matrix, a multiple of 64."""
    return num_blocks(rows) * geometry(matrix_format, cols).block_bytes


def bias_bytes(rows: int) -> int:
    """Bytes of a bias in a slab, whole blocks of rows."""
    return num_blocks(rows) * BLOCK_ROWS * 4


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [rows, cols] packed into `data`: uint8, 1-D, C-contiguous, 64-aligned, `packed_bytes` long; it keeps `data` alive."""

    format: Format
    rows: int
    cols: int
    data: Bytes

    def __post_init__(self) -> None:
        expected = packed_bytes(self.format, self.rows, self.cols)
        assert self.data.nbytes == expected, (
            f"{self.format} [{self.rows}, {self.cols}] takes {expected} bytes, not {self.data.nbytes}"
        )
        assert self.data.ctypes.data % 64 == 0, "packed matrices start at multiples of 64"


@dataclass(frozen=True)
class ExpertShape:
    """One expert's slab: gate [F, D], up [F, D], down [D, F], each packed, one after the other.

    With `has_bias` their biases follow, float32 [F], [F], [D], each padded with zeros to whole blocks of rows. `clamp`: what stands
    between gate, up and down; None: silu(gate) * up.
    """

    hidden: int
    width: int
    gate: Format
    up: Format
    down: Format
    has_bias: bool = False
    clamp: ClampedSwiGLU | None = None

    @property
    def gate_offset(self) -> int:
        """Byte offset of the gate matrix in the slab."""
        return 0

    @cached_property
    def up_offset(self) -> int:
        """Byte offset of the up matrix in the slab."""
        return packed_bytes(self.gate, self.width, self.hidden)

    @cached_property
    def down_offset(self) -> int:
        """Byte offset of the down matrix in the slab."""
        return self.up_offset + packed_bytes(self.up, self.width, self.hidden)

    @cached_property
    def bias_offsets(self) -> tuple[int, int, int]:
        """Byte offsets of the biases of gate, up and down; meaningless without them."""
        start = self.down_offset + packed_bytes(self.down, self.hidden, self.width)
        wide = bias_bytes(self.width)
        return start, start + wide, start + 2 * wide

    @cached_property
    def nbytes(self) -> int:
        """Bytes of an expert without the padding of its slab."""
        return self.bias_offsets[2] + bias_bytes(self.hidden) if self.has_bias else self.bias_offsets[0]

    @cached_property
    def slab_bytes(self) -> int:
        """Bytes of a slab: `nbytes` rounded up to 4096."""
        return -(-self.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


def pack(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes], out: Bytes) -> None:
    """Pack stored parts into `out` in the encoding's format, exactly; releases the GIL.

    parts: uint8, 1-D, in the order of `encoding.parts`, of `encoding.part_bytes` bytes, at any alignment.
    out: uint8, 1-D, `packed_bytes(encoding.format, rows, cols)` bytes.
    """
    from colibri_mp.kernels.packing import pack_parts

    sizes, expected = tuple(part.nbytes for part in parts), encoding.part_bytes(rows, cols)
    assert sizes == expected, f"parts of {sizes} bytes instead of {expected}"
    num_bytes = packed_bytes(encoding.format, rows, cols)
    assert out.nbytes == num_bytes, f"{out.nbytes} bytes of room for {num_bytes}"
    pack_parts(encoding, rows, cols, parts, out)


def fill_bias(kind: str, stored: Bytes, out: Bytes) -> None:
    """A bias as stored, bf16, f16 or f32 elements, into its place in a slab (`bias_bytes`, 64-aligned): float32, then zeros."""
    from colibri_mp.kernels.reference import elements

    values, place = elements(stored, kind), out.view(np.float32)
    place[: values.size], place[values.size :] = values, 0.0


def gather_rows(matrix: PackedMatrix, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Rows of a packed matrix as float32 [T, cols] (embedding lookup), code * scale + bias rounded twice as in the reference.

    row_ids: int32 [T]. Raises IndexError for an id outside the matrix.
    """
    from colibri_mp.kernels.gathering import gather

    if len(row_ids) and not (row_ids.min() >= 0 and row_ids.max() < matrix.rows):
        raise IndexError(f"row ids {row_ids.min()}..{row_ids.max()} of a matrix with {matrix.rows} rows")
    out = np.empty((len(row_ids), matrix.cols), np.float32)
    gather(matrix, row_ids, out)
    return out
