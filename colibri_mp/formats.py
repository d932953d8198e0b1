"""Weight formats: how a matrix is *stored* in a checkpoint and how the kernels *compute* with it.

`Encoding` names the stored form of one matrix [rows, cols] and the byte size of its parts; `Format` names the form that
the kernels read (packed in blocks of 16 rows, see `kernels.layout`). Every encoding has one format that holds the same
values in as many bits:

    stored                                                computed as
    bf16, f16, f32                                        the same element type
    affine 2, 3, 4, 5, 6, 8 bit                           q2 ... q8: codes, group and scales kept
    mxfp4 (FP4 codes, E8M0 scale, groups of 32)           fp4: codes and scales kept; 2 * FP4 + 12 is a code like any other
    nvfp4 (FP4 codes, E4M3 scale, groups of 16)           likewise
    mxfp8 (E4M3 codes, E8M0 scale, groups of 32)          fp8: codes and scales kept, products in float32
    fp8 (E4M3 codes, a scale for each tile of 128 x 128)  likewise; the scale as float32 once for each 16 rows of a tile
    int4 of colibrì in groups                             q4 whose biases are -8 * scale, and not stored
    int8, int4 of colibrì by row                          q8, q4 whose scale is that of the row; biases as above

See docs/formats.md for the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the command line, which names formats, answers without loading it
    import numpy as np
    import numpy.typing as npt

ElementType = Literal["bf16", "f16", "f32"]
EncodingKind = Literal["bf16", "f16", "f32", "affine", "mxfp4", "nvfp4", "mxfp8", "fp8", "grouped", "row"]
FormatKind = Literal["q2", "q3", "q4", "q5", "q6", "q8", "fp4", "fp8", "bf16", "f16", "f32"]

ExpertBits = Literal["stored", "4", "8", "mixed"]
"""What experts are quantised to: "stored" keeps their encodings, "mixed" is 4 in gate and up and 8 in down."""

ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
TILE = 128
"""Rows and columns of a tile of fp8; the last tiles of a matrix may be smaller."""
FP8_COLUMNS = 8
"""Rows of E4M3 codes have a multiple of so many."""
INT4_GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""Of colibrì's containers."""
_ROW_GROUPS = (128, 64, 32, 16)

_FLOAT_GROUPS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


class Format(NamedTuple):
    """A compute format. `group_size` is 0 and `scale` is "" for the plain element types.

    `scale`: element type of the scales and biases of q2 ... q8; e8m0 or e4m3: a byte for each row and group; tile: a float32 for the 16
    rows and a group. Of q4 and q8, whose bias then is -8 or -128 times the scale: symmetric, a float32 for each row and group; row, a
    float32 for each row.
    """

    kind: FormatKind
    group_size: int = 0
    scale: Literal["bf16", "f16", "f32", "e8m0", "e4m3", "tile", "symmetric", "row", ""] = ""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A stored format; a matrix [rows, cols] has the parts `weight`, and for grouped kinds scales, for affine `biases`.

    Each part is row-major. `weight` of an affine matrix is a little-endian bit stream of `bits` a value in each row,
    `scales`/`biases` are [rows, cols / group_size] of `scale` ("u8" for the mx/nv kinds); `weight_scale_inv` of fp8 is
    [rows / 128, cols / 128], rounded up. colibrì's `qs` is float32 [rows, cols / group_size] or, kind "row", [rows]: there `group_size`
    is only how many activations share a scale in the kernels. Its int4 codes are value + 8, low nibble first; int8 codes are signed.
    """

    kind: EncodingKind
    bits: int = 0
    group_size: int = 0
    scale: Literal["bf16", "f16", "f32", "u8", ""] = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored parts, in the order that `part_bytes` and the packers use."""
        if self.kind == "affine":
            return ("weight", "scales", "biases")
        if self.kind == "fp8":
            return ("weight", "weight_scale_inv")
        if self.kind in ("grouped", "row"):
            return ("weight", "qs")
        return ("weight", "scales") if self.group_size else ("weight",)

    @property
    def row_tile(self) -> int:
        """Rows that share scales: a matrix may be cut into blocks of rows at multiples of this."""
        return TILE if self.kind == "fp8" else 1

    def groups(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scales of a matrix [rows, cols]."""
        return -(-rows // self.row_tile), 1 if self.kind == "row" else -(-cols // self.group_size)

    def part_bytes(self, rows: int, cols: int) -> tuple[int, ...]:
        """Bytes of each part of a matrix [rows, cols]."""
        if not self.group_size:
            return (rows * cols * ELEMENT_BYTES[self.kind],)
        down, across = self.groups(rows, cols)
        group_bytes = down * across * ELEMENT_BYTES[self.scale]
        return (rows * cols * self.bits // 8, *[group_bytes] * (len(self.parts) - 1))

    def take_rows(
        self, parts: "Sequence[npt.NDArray[np.uint8]]", cols: int, first: int, num_rows: int
    ) -> "list[npt.NDArray[np.uint8]]":
        """The parts of rows `first` (a multiple of `row_tile`) to `first + num_rows`; views."""
        starts, sizes = self.part_bytes(first, cols), self.part_bytes(num_rows, cols)
        return [part[start : start + size] for part, start, size in zip(parts, starts, sizes, strict=True)]

    def describe(self) -> str:
        """For people: "affine 4 bit in groups of 64"."""
        if self.kind == "fp8":
            return f"fp8 in tiles of {TILE} x {TILE}"
        if self.kind == "row":
            return f"int{self.bits} by row"
        if not self.group_size:
            return self.kind
        return f"{self.kind} {self.bits} bit in groups of {self.group_size}"

    def is_supported(self, cols: int) -> bool:
        """Whether this is one of the encodings in the module docstring, and rows of `cols` values can have it."""
        match self.kind:
            case "bf16" | "f16" | "f32":
                return self == Encoding(self.kind)
            case "affine":
                known = self.bits in AFFINE_BITS and self.group_size in AFFINE_GROUP_SIZES
                return known and self.scale in ("bf16", "f16", "f32") and cols % self.group_size == 0
            case "mxfp4" | "mxfp8" | "nvfp4":
                sizes = _FLOAT_GROUPS[self.kind]
                return (self.bits, self.group_size, self.scale) == (*sizes, "u8") and cols % self.group_size == 0
            case "fp8":
                known = (self.bits, self.group_size) == (8, TILE) and self.scale in ("bf16", "f32")
                return known and cols % FP8_COLUMNS == 0
            case "grouped":
                known = self.bits == 4 and self.group_size in INT4_GROUP_SIZES and self.scale == "f32"
                return known and cols % self.group_size == 0
            case "row":
                return self.bits in (4, 8) and self.scale == "f32" and self.group_size == row_group(cols) > 0

    @property
    def format(self) -> Format:
        """The compute format that holds the same values (table in the module docstring)."""
        if self.kind == "bf16" or self.kind == "f16" or self.kind == "f32":  # noqa: PLR1714  # mypy narrows these
            return Format(self.kind)
        if self.kind == "affine":
            assert self.scale in ("bf16", "f16", "f32")
            return Format(_AFFINE_FORMATS[self.bits], self.group_size, self.scale)
        if self.kind == "row":
            return Format(_AFFINE_FORMATS[self.bits], self.group_size, "row")
        return _GROUPED_FORMATS[self.kind]._replace(group_size=self.group_size)


def row_group(cols: int) -> int:
    """How many activations share a scale where weights have one for a row of `cols`; 0: such rows cannot be computed with."""
    return next((size for size in _ROW_GROUPS if cols % size == 0), 0)


_AFFINE_FORMATS: dict[int, FormatKind] = {2: "q2", 3: "q3", 4: "q4", 5: "q5", 6: "q6", 8: "q8"}
_GROUPED_FORMATS: dict[str, Format] = {
    "mxfp4": Format("fp4", scale="e8m0"),
    "nvfp4": Format("fp4", scale="e4m3"),
    "mxfp8": Format("fp8", scale="e8m0"),
    "fp8": Format("fp8", scale="tile"),
    "grouped": Format("q4", scale="symmetric"),
}
